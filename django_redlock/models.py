"""
What Django's admin, its permissions and its log need to know of held locks: a model without a table.
"""

from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote

from django.db import models
from django.utils.translation import gettext_lazy as _

from . import inventory


class HeldLockManager(models.Manager["HeldLock"]):
    """Finds nothing: locks are on the nodes. ``dumpdata`` and the like read every model, table or not."""

    def get_queryset(self) -> models.QuerySet["HeldLock"]:
        """Return no rows, without asking the database for them."""
        return super().get_queryset().none()


class HeldLock(models.Model):
    """
    A held lock, as the admin shows it; made by :meth:`of`, never read from a database.

    Its primary key names the lock *and* its holder, so that what is selected on a page cannot become another's.
    """

    key = models.TextField(primary_key=True)
    name = models.TextField(_("lock"))
    alias = models.TextField(_("alias"))
    state = models.CharField(_("state"), max_length=20, choices=inventory.State.choices)
    remaining = models.FloatField(_("remaining"), null=True)
    votes = models.IntegerField(_("votes"))
    holder = models.TextField(_("holder"))
    since = models.DateTimeField(_("since"), null=True)
    fencing_token = models.BigIntegerField(_("fencing token"))
    extensions = models.IntegerField(_("extensions"))

    lock: inventory.HeldLock
    waiting = 0  # how many wait for it, on a page that has asked

    objects = HeldLockManager()

    class Meta:
        app_label = "redlock"
        managed = False
        base_manager_name = "objects"
        default_permissions = ("view",)
        permissions = [("release_heldlock", "Can release held lock")]
        verbose_name = _("held lock")
        verbose_name_plural = _("held locks")

    def __str__(self) -> str:
        return self.name

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: a lock is taken with :func:`django_redlock.lock`."""
        raise TypeError("A HeldLock cannot be saved; take a lock with django_redlock.lock().")

    @classmethod
    def of(cls, lock: inventory.HeldLock) -> "HeldLock":
        """Return the row that shows a lock."""
        row = cls(
            key=key_of(lock.fingerprint, lock.alias, lock.slug),
            name=inventory.printable(lock.name),
            alias=lock.alias,
            state=lock.state.value,
            remaining=lock.remaining,
            votes=lock.votes,
            holder=inventory.printable(str(lock.owner)) if lock.owner else "",
            since=None if lock.since is None else datetime.fromtimestamp(lock.since, UTC),
            fencing_token=lock.fencing_token,
            extensions=lock.extensions,
        )
        row.lock = lock
        return row


def key_of(fingerprint: str, alias: str, slug: str) -> str:
    """Return the primary key for a lock and its holder: plain ASCII, because browsers rewrite line ends."""
    return f"{fingerprint}/{quote(alias, safe='')}/{quote(slug, safe='')}"


def parse_key(key: str) -> tuple[str, str, str]:
    """
    Return the fingerprint, alias and slug of a primary key.

    Raises:
        ValueError: It is not one.
    """
    fingerprint, alias, slug = key.split("/")
    return fingerprint, unquote(alias, errors="strict"), unquote(slug, errors="strict")
