from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("redlock", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="NodeRecord",
            fields=[
                ("digest", models.CharField(max_length=32, primary_key=True, serialize=False)),
                ("realm", models.CharField(max_length=32)),
                ("version", models.BigIntegerField()),
                ("ends", models.BigIntegerField(null=True)),
                ("kept", models.BigIntegerField()),
                ("state", models.TextField()),
            ],
            options={
                "db_table": "redlock_noderecord",
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["realm", "ends"], name="redlock_noderecord_ends"),
                    models.Index(fields=["kept"], name="redlock_noderecord_kept"),
                ],
            },
        ),
    ]
