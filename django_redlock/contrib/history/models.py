"""One row for each lock that ended, and for each attempt that was given up."""

from django.db import models
from django.utils.translation import gettext_lazy as _


class Hold(models.Model):
    """A lock that was held, or that a caller did not get."""

    alias = models.CharField(_("alias"), max_length=100)
    name = models.CharField(_("lock"), max_length=200)
    template = models.CharField(_("kind of lock"), max_length=100)
    outcome = models.CharField(_("outcome"), max_length=20)
    waited = models.FloatField(_("waited, in seconds"))
    held = models.FloatField(_("held, in seconds"), null=True)
    ttl = models.FloatField(_("lease, in seconds"), null=True)
    extensions = models.IntegerField(_("extensions"), default=0)
    fencing_token = models.BigIntegerField(_("fencing token"), null=True)
    host = models.CharField(_("host"), max_length=100)
    pid = models.IntegerField(_("process"))
    ended = models.DateTimeField(_("ended"), db_index=True)

    class Meta:
        default_permissions = ("view",)
        verbose_name = _("former lock")
        verbose_name_plural = _("former locks")
        ordering = ("-ended", "-pk")
        indexes = (models.Index(fields=["template", "ended"], name="redlock_history_template"),)

    def __str__(self) -> str:
        return self.name
