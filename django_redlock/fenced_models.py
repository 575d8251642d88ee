"""
A fence in each row, for bulk writes that do not read; holders need not wait for one common row.

It protects less than :func:`django_redlock.fenced`: only rows that are updated through it. Values that were read before
are not protected, and neither are rows that are inserted or deleted.
"""

from typing import TYPE_CHECKING, Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import models, transaction
from django.db.models import Max, Q
from django.utils.translation import gettext_lazy as _

from .engine.lease import Lease, fence_out
from .exceptions import StaleTokenError

M = TypeVar("M", bound=models.Model)

MYPY = False  # mypy takes it for True: its plugin for Django knows the managers of querysets, and pyright does not


class FencedQuerySet(models.QuerySet[M]):
    """A queryset with :meth:`fenced_update`, for models with the columns of :class:`FencedModel`."""

    if TYPE_CHECKING and not MYPY:

        @classmethod
        def as_manager(cls) -> "FencedManager[Any]":
            """Return a manager with the methods of this queryset."""

    def fenced_update(self, lease: Lease, **values: Any) -> int:
        """
        Update all rows, or none if a later holder of the lock has written one of them; return how many.

        ``F()`` expressions are safe; a value that was read before is not.

        Args:
            lease: The exclusive lease of the lock that all writers of these rows take.
            values: The new values, as for ``update()``.

        Raises:
            LockLostError: The lease has ended.
            StaleTokenError: A later holder has written one of the rows; nothing was updated, and the lease is lost.
            ValueError: The lease is shared.
        """
        if lease.hold.shared:
            raise ValueError(f"Lock {lease.name!r} is held with shared=True; take it exclusively to write.")
        lease.ensure()
        number, owner = lease.fencing_token, lease.hold.owner()
        later = Q(fence_token__gt=number) | (Q(fence_token=number) & ~Q(fence_owner=owner))
        self._for_write = True  # chooses the database
        rows = self.using(self.db)
        with transaction.atomic(using=self.db):
            count = rows.filter(~later).update(fence_token=number, fence_owner=owner, **values)
            seen = rows.filter(later).aggregate(seen=Max("fence_token"))["seen"]
            if seen is not None:
                fence_out(lease, seen)
                raise StaleTokenError(lease.name, number)
        return count

    async def afenced_update(self, lease: Lease, **values: Any) -> int:
        """Do what :meth:`fenced_update` does without blocking."""
        return await sync_to_async(self.fenced_update)(lease, **values)


if TYPE_CHECKING and not MYPY:
    N = TypeVar("N", bound=models.Model)

    class FencedManager(FencedQuerySet[M], models.Manager[M]):
        """What ``as_manager()`` returns: a manager of the model that it is an attribute of."""

        def __get__(self, instance: None, cls: type[N]) -> "FencedManager[N]":
            """Return the manager with its model."""


class FencedModel(models.Model):
    """
    Abstract base of models whose rows record their latest writer; see :class:`FencedQuerySet`.

    If a model has a manager of its own, create it from :class:`FencedQuerySet`.
    """

    fence_token = models.BigIntegerField(_("fencing token"), default=0, editable=False)
    fence_owner = models.CharField(_("owner"), max_length=32, default="", editable=False)

    objects = FencedQuerySet.as_manager()

    class Meta:
        abstract = True
