"""The table of fences, and the model of held locks, which has no table but permissions and a content type."""

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="HeldLock",
            fields=[
                ("key", models.TextField(primary_key=True, serialize=False)),
                ("name", models.TextField(verbose_name="lock")),
                ("alias", models.TextField(verbose_name="alias")),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("held", "held"),
                            ("degraded", "degraded"),
                            ("partial", "partial"),
                            ("split", "split"),
                            ("no_expiry", "no expiry"),
                        ],
                        max_length=20,
                        verbose_name="state",
                    ),
                ),
                ("remaining", models.FloatField(null=True, verbose_name="remaining")),
                ("votes", models.IntegerField(verbose_name="votes")),
                ("holder", models.TextField(verbose_name="holder")),
                ("since", models.DateTimeField(null=True, verbose_name="since")),
                ("fencing_token", models.BigIntegerField(verbose_name="fencing token")),
            ],
            options={
                "verbose_name": "held lock",
                "verbose_name_plural": "held locks",
                "permissions": [("release_heldlock", "Can release held lock")],
                "managed": False,
                "default_permissions": ("view",),
                "base_manager_name": "objects",
            },
        ),
        migrations.CreateModel(
            name="Fence",
            fields=[
                ("key", models.CharField(max_length=32, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=200, verbose_name="lock")),
                ("token", models.BigIntegerField(default=0, verbose_name="fencing token")),
                ("owner", models.CharField(default="", max_length=32, verbose_name="owner")),
                ("updated", models.DateTimeField(db_index=True, verbose_name="updated")),
            ],
            options={
                "verbose_name": "fence",
                "verbose_name_plural": "fences",
                "default_permissions": ("view",),
            },
        ),
    ]
