"""
The models: fences, the records of database nodes, and held locks, which have no table.

Django's admin, its permissions and its log need a model of held locks.
"""

from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, ClassVar
from urllib.parse import quote, unquote

from django.db import models
from django.utils.timezone import localtime
from django.utils.translation import gettext_lazy as _

from . import inventory
from .exceptions import printable
from .nodes.database.table import TABLE

MAX_SHOWN = 200  # characters of a lock's name in the table of fences


class Fence(models.Model):
    """
    The pair (token, owner) of the latest holder of one lock that opened a transaction in this database.

    Only :func:`django_redlock.fenced` writes these rows. If a row is deleted, an old holder that comes back is let in
    again. ``manage.py redlock_prune_fences`` deletes the rows that nobody has claimed for a long time.
    """

    key = models.CharField(max_length=32, primary_key=True)
    name = models.CharField(_("lock"), max_length=MAX_SHOWN)
    token = models.BigIntegerField(_("fencing token"), default=0)
    owner = models.CharField(_("owner"), max_length=32, default="")
    updated = models.DateTimeField(_("updated"), db_index=True)

    class Meta:
        app_label = "redlock"
        default_permissions = ("view",)
        verbose_name = _("fence")
        verbose_name_plural = _("fences")

    def __str__(self) -> str:
        return self.name


def fence_key(name: str, permit: str = "") -> str:
    """
    Return the primary key of a lock's fence: a digest, because databases treat some different names as equal.

    Args:
        name: Name of the lock.
        permit: Number of the permit, for a lock that several callers may hold; each permit has a fence of its own.
    """
    digest = sha256(name.encode())
    if permit:
        digest = sha256(digest.digest() + permit.encode())
    return digest.hexdigest()[:32]


class HeldLockManager(models.Manager["HeldLock"]):
    """Find nothing: locks are on the nodes. Commands such as ``dumpdata`` read every model, with a table or not."""

    def get_queryset(self) -> models.QuerySet["HeldLock"]:
        """Return no rows, without querying the database."""
        return super().get_queryset().none()


class HeldLock(models.Model):
    """
    A held lock, as the admin shows it; it is never read from a database.

    Its primary key names the lock *and* its holder, so that a selection on a page never applies to a later holder.
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

    lock: inventory.LockReport
    asked = ""  # how long ago the holder was asked to stop, if the page has looked that up

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
    def of(cls, lock: inventory.LockReport) -> "HeldLock":
        """Return the row that shows a lock."""
        row = cls(
            key=key_of(lock.fingerprint, lock.alias, lock.slug),
            name=printable(lock.name),
            alias=lock.alias,
            state=lock.state.value,
            remaining=lock.remaining,
            votes=lock.votes,
            holder=lock.holder,
            since=None if lock.since is None else datetime.fromtimestamp(lock.since, UTC),
            fencing_token=lock.fencing_token,
            extensions=lock.extensions,
        )
        row.lock = lock
        return row

    @property
    def status(self) -> str:
        """The state in words; if the work of the holder is over, until when the lock stays taken."""
        if not (until := self.lock.kept_until):
            return self.lock.status("")
        ends = localtime(datetime.fromtimestamp(until, UTC))
        today = ends.date() == datetime.now(ends.tzinfo).date()
        return self.lock.status(f"{ends:%H:%M:%S}" if today else f"{ends:%Y-%m-%d %H:%M}")


def key_of(fingerprint: str, alias: str, slug: str) -> str:
    """Return the primary key for a lock and its holder: plain ASCII, because browsers rewrite line ends."""
    return f"{fingerprint}/{quote(alias, safe='')}/{quote(slug, safe='')}"


def parse_key(key: str) -> tuple[str, str, str]:
    """
    Return the fingerprint, alias and slug of a primary key.

    Raises:
        ValueError: *key* is not such a key.
    """
    fingerprint, alias, slug = key.split("/")
    return fingerprint, unquote(alias, errors="strict"), unquote(slug, errors="strict")


class NodeRecord(models.Model):
    """
    What a database node stores about one name; only :mod:`django_redlock.nodes.database.table` uses it.

    Times are microseconds since the epoch by the server's clock.
    """

    digest = models.CharField(max_length=32, primary_key=True)
    realm = models.CharField(max_length=32)
    version = models.BigIntegerField()
    ends = models.BigIntegerField(null=True)
    kept = models.BigIntegerField()
    state = models.TextField()

    class Meta:
        app_label = "redlock"
        db_table = TABLE
        default_permissions = ()
        indexes: ClassVar = [
            models.Index(fields=["realm", "ends"], name="redlock_noderecord_ends"),
            models.Index(fields=["kept"], name="redlock_noderecord_kept"),
        ]

    def __str__(self) -> str:
        return self.digest
