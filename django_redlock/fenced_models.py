"""
A fence in each row, for bulk writes that do not read; holders need not wait for one common row.

It protects less than :func:`django_redlock.fenced`: only rows that are updated through it. Values that were read before
are not protected, and neither are rows that are inserted or deleted.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import models, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q
from django.db.models.sql import UpdateQuery
from django.utils.translation import gettext_lazy as _

from .db.threads import in_thread
from .engine.lease import Lease, fence_out
from .exceptions import StaleTokenError

M = TypeVar("M", bound=models.Model)

BATCH = 500  # rows in one statement: older versions of SQLite accept at most 999 values
MYPY = False  # mypy takes it for True: its plugin for Django knows the managers of querysets, and pyright does not


if TYPE_CHECKING:
    AnyField = models.Field[Any, Any]
else:
    AnyField = models.Field


class FencedQuerySet(models.QuerySet[M]):
    """A queryset with :meth:`fenced_update`, for models with the columns of :class:`FencedModel`."""

    if TYPE_CHECKING and not MYPY:

        @classmethod
        def as_manager(cls) -> "FencedManager[Any]":
            """Return a manager with the methods of this queryset."""

    def fenced_update(self, lease: Lease, **values: Any) -> int:
        """
        Update all rows, or none if a later holder of the lock has written one of them; return how many.

        ``F()`` expressions are safe; a value that was read before is not. Rows that no longer match the filter when the
        update reaches them are not updated and not reported.

        Args:
            lease: The exclusive lease of the lock that all writers of these rows take.
            values: The new values, as for ``update()``.

        Raises:
            LockLostError: The lease has ended.
            StaleTokenError: A later holder has written one of the rows; nothing was updated, and the lease is lost.
            TypeError: The columns are in several tables, because the model inherits from another one.
            ValueError: The lease is shared.
        """
        if lease.hold.shared:
            raise ValueError(f"Lock {lease.name!r} is held with shared=True; take it exclusively to write.")
        refuse_several_tables(self.model, values)
        lease.ensure()
        number, owner = lease.fencing_token, lease.hold.owner()
        later = Q(fence_token__gt=number) | (Q(fence_token=number) & ~Q(fence_owner=owner))
        self._for_write = True  # chooses the database
        key, count = [field.attname for field in self.model._meta.pk_fields], 0
        with transaction.atomic(using=self.db):
            for rows in self._in_one_table(later):
                count += rows.filter(~later).update(fence_token=number, fence_owner=owner, **values)
                # A locking read sees the rows as they are now, and not as at the beginning of an outer transaction.
                same = rows.order_by().values(*key)
                found = models.QuerySet[M](self.model, using=self.db).filter(later, pk__in=same)
                seen = found.select_for_update().order_by("-fence_token").values_list("fence_token", flat=True).first()
                if seen is not None:
                    fence_out(lease, seen)
                    raise StaleTokenError(lease.name, number)
        return count

    def _in_one_table(self, condition: Q) -> Iterator[models.QuerySet[M]]:
        """
        Yield querysets of these rows that an UPDATE with *condition* can name in its own WHERE clause.

        If a queryset has joins, Django chooses the rows in a subquery, or in a query before the UPDATE. Neither is
        repeated after the UPDATE has waited for the lock of a row, so the condition would be that of the old row.
        """
        rows = self.using(self.db)
        query = rows.filter(condition).query.chain(UpdateQuery)
        query.get_initial_alias()
        if query.count_active_tables() == 1:
            yield rows
            return
        keys = list(dict.fromkeys(rows.order_by().values_list("pk", flat=True)))
        for first in range(0, len(keys), BATCH):
            yield models.QuerySet[M](self.model, using=self.db).filter(pk__in=keys[first : first + BATCH])

    async def afenced_update(self, lease: Lease, **values: Any) -> int:
        """Do what :meth:`fenced_update` does without blocking."""
        return await in_thread(partial(self.fenced_update, lease, **values))


def refuse_several_tables(model: type[models.Model], values: Iterable[str]) -> None:
    """
    Make sure that one UPDATE writes the values and the fence.

    Raises:
        TypeError: Some columns are in the table of a parent.
    """
    own = (model._meta.concrete_model or model)._meta.local_concrete_fields
    names = [name for name in ("fence_token", *values) if model._meta.get_field(name) not in own]
    if names:
        label = model._meta.object_name
        raise TypeError(
            f"fenced_update() of {label} would write several tables, and only one of them has the fence: "
            f"{', '.join(names)} is in the table of a parent. Update the rows behind the fence of the lock "
            f"instead: with fenced(lease): {label}.objects.filter(...).update(...)"
        )


if TYPE_CHECKING and not MYPY:
    N = TypeVar("N", bound=models.Model)

    class FencedManager(FencedQuerySet[M], models.Manager[M]):
        """What ``as_manager()`` returns: a manager of the model that it is an attribute of."""

        def __get__(self, instance: None, cls: type[N]) -> "FencedManager[N]":
            """Return the manager with its model."""


class _Column:
    """
    A column, as the new value of itself.

    Of an expression, Django 6 asks the database for the result, or forgets the attribute if that cannot tell.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> tuple[str, tuple[()]]:
        """Return the SQL."""
        return connection.ops.quote_name(self._name), ()


class _Fence(AnyField):
    """
    A column that only an update writes, and not ``save()``.

    An instance may have been read before the latest holder wrote the row. If it wrote the fence of that time back, an
    earlier holder would be let in again. Migrations name Django's own field.
    """

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        """Return the value of a new row; of any other, the column itself."""
        return super().pre_save(model_instance, add) if add else _Column(str(self.column))

    def deconstruct(self) -> Any:
        """Describe Django's own field."""
        name, _, args, kwargs = super().deconstruct()
        return name, f"django.db.models.{self.get_internal_type()}", args, kwargs


class FenceToken(_Fence, models.BigIntegerField):  # type: ignore[type-arg]
    """The fencing token of the latest writer."""


class FenceOwner(_Fence, models.CharField):  # type: ignore[type-arg]
    """The latest writer."""


class FencedModel(models.Model):
    """
    Abstract base of models whose rows record their latest writer; see :class:`FencedQuerySet`.

    If a model has a manager of its own, create it from :class:`FencedQuerySet`. ``save()`` checks no fence and leaves
    that of the row as it is.
    """

    fence_token = FenceToken(_("fencing token"), default=0, editable=False)
    fence_owner = FenceOwner(_("owner"), max_length=32, default="", editable=False)

    objects = FencedQuerySet.as_manager()

    class Meta:
        abstract = True
