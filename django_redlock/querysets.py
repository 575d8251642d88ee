"""
Lock rows for a piece of work: the lock goes around the transaction, never the other way round.

A lock that is released inside a transaction lets the next holder read rows that are about to change. So the order
is fixed: take the locks of all rows at once, open the outermost transaction, read the rows again, run the body,
check the lease, commit or roll back, release.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, overload

from asgiref.sync import sync_to_async
from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model, QuerySet
from django.db.models.manager import BaseManager

from .conf import DEFAULT_ALIAS
from .exceptions import LockLostError, LockTakenError
from .handler import locks
from .locks import Lease, Lock

M = TypeVar("M", bound=Model)
Rows = TypeVar("Rows")
Read = TypeVar("Read", covariant=True)

MAX_ROWS = 200  # rows in one lock
COMMITTED = "The transaction had already been committed: its changes are kept, but they may not have been exclusive."


@overload
def lock_for_update(
    target: M,
    *,
    nowait: bool = False,
    wait: float | None = None,
    ttl: float | None = None,
    using: str = DEFAULT_ALIAS,
) -> "RowLock[M]": ...


@overload
def lock_for_update(
    target: QuerySet[M] | BaseManager[M],
    *,
    nowait: bool = False,
    skip_locked: bool = False,
    wait: float | None = None,
    ttl: float | None = None,
    using: str = DEFAULT_ALIAS,
) -> "RowLock[list[M]]": ...


def lock_for_update(
    target: Any,
    *,
    nowait: bool = False,
    skip_locked: bool = False,
    wait: float | None = None,
    ttl: float | None = None,
    using: str = DEFAULT_ALIAS,
) -> "RowLock[Any]":
    """
    Lock a row or the rows of a queryset, and work on them in a transaction.

    ``with lock_for_update(order) as order:`` refreshes and gives the instance, ``with lock_for_update(queryset) as
    orders:`` gives a list of the rows that match once they are locked. The rows are locked all or none, the block
    is the outermost transaction of their database, and the locks are released when it was committed or rolled back.
    When the lease is lost before the commit, the transaction is rolled back.

    ``async with`` locks and reads in the same way, but Django has no transactions for asynchronous code: there is
    none around the block, so nothing in it is rolled back.

    Args:
        target: A saved instance, a queryset or a manager; at most 200 rows. A slice is locked as evaluated.
        nowait: Raise at once if a row is locked; the same as ``wait=0``.
        skip_locked: Leave out the rows that others have locked, instead of waiting. Only for querysets.
        wait: How long to try, in seconds; 0 is one attempt, None is for ever.
        ttl: Length of the lease in seconds; None is ``OPTIONS["ttl"]``. It is renewed as the settings say.
        using: Alias in ``REDLOCK``, not in ``DATABASES``: the database is the one that the target is written to.

    Raises:
        TypeError: The target is something else, or a queryset that does not yield instances.
        ValueError: The instance is not saved, or the options exclude each other.

    On entering the block: ``LockTakenError``, ``QuorumUnavailableError``, ``DoesNotExist`` when the instance is gone,
    ``ValueError`` when there are too many rows, and ``RuntimeError`` when a transaction is already open, before any
    lock is taken. On leaving it: ``LockLostError``; the block's own exception goes before it.
    """
    if sum((nowait, skip_locked, wait is not None)) > 1:
        raise ValueError("nowait, skip_locked and wait are three answers to one question; pass only one of them.")
    if isinstance(target, Model):
        if skip_locked:
            raise ValueError(
                "skip_locked needs a queryset, from which a row can be left out; use nowait for an instance."
            )
        return RowLock(_Instance(target), False, 0 if nowait else wait, ttl, using)
    rows = _Rows(target.all() if isinstance(target, BaseManager) else target)
    return RowLock(rows, skip_locked, 0 if nowait or skip_locked else wait, ttl, using)


class LockableQuerySet(QuerySet[M]):
    """
    A queryset with :meth:`redlock_for_update`.

    Use it as a base class of your own querysets, or as it is: ``objects = LockableQuerySet.as_manager()``.
    """

    def redlock_for_update(
        self,
        *,
        nowait: bool = False,
        skip_locked: bool = False,
        wait: float | None = None,
        ttl: float | None = None,
        using: str = DEFAULT_ALIAS,
    ) -> "RowLock[list[M]]":
        """Return :func:`lock_for_update` of these rows, with the same options; takes no lock until it is entered."""
        return lock_for_update(self, nowait=nowait, skip_locked=skip_locked, wait=wait, ttl=ttl, using=using)


@dataclass(frozen=True, slots=True)
class Row:
    """A row to lock: its primary key and the names that stand for it."""

    pk: Any
    names: tuple[str, ...]


class Target(Protocol[Read]):
    """What is locked: which rows, in which database, and how they are read again."""

    db: str
    label: str

    def rows(self) -> list[Row]:
        """Find the rows, before they are locked."""

    def read(self, rows: list[Row]) -> Read:
        """Read them, once they are locked."""


class RowLock(Generic[Rows]):
    """
    The rows of :func:`lock_for_update`, for one ``with`` or ``async with`` at a time.

    Nothing is locked or read before it is entered.
    """

    def __init__(
        self, target: Target[Rows], skip_locked: bool, wait: float | None, ttl: float | None, using: str
    ) -> None:
        self._target = target
        self._skip_locked = skip_locked
        self._wait = wait
        self._ttl = ttl
        self._using = using
        self._entered: AbstractContextManager[Rows] | None = None
        self._aentered: AbstractAsyncContextManager[Rows] | None = None

    def __repr__(self) -> str:
        return f"<RowLock {self._target.label}>"

    def __enter__(self) -> Rows:
        self._refuse_nesting()
        entering = self._hold()
        rows = entering.__enter__()
        self._entered = entering
        return rows

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._entered is not None
        entered, self._entered = self._entered, None
        return entered.__exit__(kind, error, trace)

    async def __aenter__(self) -> Rows:
        self._refuse_nesting()
        entering = self._ahold()
        rows = await entering.__aenter__()
        self._aentered = entering
        return rows

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._aentered is not None
        entered, self._aentered = self._aentered, None
        return await entered.__aexit__(kind, error, trace)

    @contextmanager
    def _hold(self) -> Iterator[Rows]:
        refuse_transaction(self._target)
        rows = self._target.rows()
        committed = False
        try:
            with ExitStack() as held:
                rows, leases = self._take(rows, held)
                with transaction.atomic(using=self._target.db, durable=True):
                    yield self._target.read(rows)
                    for lease in leases:
                        lease.ensure()  # a lost lock must roll back, not commit
                committed = True
        except LockLostError as error:
            if committed:
                error.add_note(COMMITTED)
            raise

    @asynccontextmanager
    async def _ahold(self) -> AsyncIterator[Rows]:
        # Django would let us open a transaction in the thread that runs database calls, but outside of an ASGI
        # request all tasks share that thread, and their queries would become part of it.
        await sync_to_async(refuse_transaction)(self._target)
        rows = await sync_to_async(self._target.rows)()
        async with AsyncExitStack() as held:
            rows = await self._atake(rows, held)
            yield await sync_to_async(self._target.read)(rows)

    def _take(self, rows: list[Row], held: ExitStack) -> tuple[list[Row], list[Lease]]:
        """Take the locks; returns the rows that are ours now, and the leases."""
        if rows and not self._skip_locked:
            return rows, [held.enter_context(self._lock(rows))]
        taken: list[tuple[Row, Lease]] = []
        for row in rows:
            try:
                taken.append((row, held.enter_context(self._lock([row]))))
            except LockTakenError:
                continue
        return [row for row, _ in taken], [lease for _, lease in taken]

    async def _atake(self, rows: list[Row], held: AsyncExitStack) -> list[Row]:
        """Take the locks without blocking; returns the rows that are ours now."""
        if rows and not self._skip_locked:
            await held.enter_async_context(self._lock(rows))
            return rows
        taken: list[Row] = []
        for row in rows:
            try:
                await held.enter_async_context(self._lock([row]))
            except LockTakenError:
                continue
            taken.append(row)
        return taken

    def _lock(self, rows: list[Row]) -> Lock:
        """Describe one lock over all *rows*; the manager sorts their names, so two of them cannot deadlock."""
        names = [name for row in rows for name in row.names]
        what = f"{self._target.label} {rows[0].pk}" if len(rows) == 1 else f"{self._target.label}, {len(rows)} rows"
        return locks[self._using].lock(names, ttl=self._ttl, wait=self._wait, kind="model", label=what)

    def _refuse_nesting(self) -> None:
        if self._entered is not None or self._aentered is not None:
            raise RuntimeError(f"{self!r} is already entered; call lock_for_update() anew for every block.")


class _Instance(Generic[M]):
    """One row, of which the caller has an instance."""

    def __init__(self, instance: M) -> None:
        if instance._state.adding or None in _parts(instance.pk):
            raise ValueError(
                f"This {instance._meta.label} is not saved, so it has no row to lock. Save it first; nobody else can "
                "know it before."
            )
        self._instance = instance
        self.db = router.db_for_write(type(instance), instance=instance)
        self.label = instance._meta.label

    def rows(self) -> list[Row]:
        """Name the row; asks no database."""
        roots = _roots(type(self._instance))
        return [Row(self._instance.pk, tuple(_name(root, getattr(self._instance, field)) for root, field in roots))]

    def read(self, rows: list[Row]) -> M:
        """Refresh and return the instance."""
        self._instance.refresh_from_db(using=self.db)
        return self._instance


class _Rows(Generic[M]):
    """The rows of a queryset."""

    def __init__(self, queryset: QuerySet[M]) -> None:
        _check_queryset(queryset)
        queryset = queryset.all()
        queryset._for_write = True  # type: ignore[attr-defined]  # as select_for_update(): a replica may lag behind
        self._queryset = queryset
        self.db = queryset.db
        self.label = queryset.model._meta.label

    def rows(self) -> list[Row]:
        """
        Find the primary keys of the rows.

        Raises:
            ValueError: There are more than one lock can have.
        """
        roots = _roots(self._queryset.model)
        fields = list(dict.fromkeys(["pk", *(field for _, field in roots)]))  # Django 5.2.0 gives a repeated one once
        found = self._queryset.using(self.db).values_list(*fields)
        found.query.select_for_update = False  # needs a transaction, which is opened when the rows are locked
        values = list(found[: MAX_ROWS + 1])
        if len(values) > MAX_ROWS:
            raise ValueError(
                f"The queryset of {self.label} has more than {MAX_ROWS} rows, the most that one lock can have. Lock "
                f"slices of it, or one name for all of them: with lock('{self.label.lower()}:all')."
            )
        rows: dict[Any, Row] = {}
        for each in values:
            keys = dict(zip(fields, each, strict=True))
            rows[keys["pk"]] = Row(keys["pk"], tuple(_name(root, keys[field]) for root, field in roots))
        return list(rows.values())

    def read(self, rows: list[Row]) -> list[M]:
        """Return the rows that still match the queryset, in its order."""
        again = self._queryset.using(self.db)
        again.query.clear_limits()  # a slice cannot be filtered, and the primary keys are all it has
        return list(again.filter(pk__in=[row.pk for row in rows]))


def _check_queryset(queryset: object) -> None:
    if not isinstance(queryset, QuerySet):
        raise TypeError(
            f"lock_for_update() needs a model instance or a queryset, not {type(queryset).__name__}; for a list of "
            "instances, pass Model.objects.filter(pk__in=[...])."
        )
    if queryset._fields is not None:  # type: ignore[attr-defined]
        raise TypeError(
            "lock_for_update() needs a queryset of instances; leave out values(), values_list() and dates(), and take "
            "the values from the rows inside the block."
        )
    if queryset.query.combinator:
        raise TypeError(
            "lock_for_update() cannot read the rows of union(), intersection() or difference() again; combine the "
            "conditions with Q objects."
        )


def _parts(pk: object) -> tuple[object, ...]:
    return pk if isinstance(pk, tuple) else (pk,)


def _roots(model: type[Model]) -> list[tuple[type[Model], str]]:
    """
    Return the models at the root of *model*, and the field in which it has their primary keys.

    A proxy is its concrete model, and a row of a child is also a row of its parents. There are several roots only
    when a model inherits the tables of several.
    """
    concrete = model._meta.concrete_model or model
    tops = dict(_links(concrete))
    if len(tops) > 1:
        return list(tops.items())
    return [(next(iter(tops), concrete), "pk")]


def _links(concrete: type[Model]) -> Iterator[tuple[type[Model], str]]:
    for parent, link in concrete._meta.parents.items():
        if parent._meta.parents:
            yield from _links(parent)
        elif link:
            yield parent, link.attname


def _name(root: type[Model], key: object) -> str:
    """Return the name that stands for a row, the same in every process and for every way to write its key."""
    fields = root._meta.pk_fields
    texts = [_plain(field.to_python(part)) for field, part in zip(fields, _parts(key), strict=True)]
    if len(texts) > 1:
        texts = [text.replace("%", "%25").replace(",", "%2C") for text in texts]
    return f"model:{root._meta.label_lower}:{','.join(texts)}"


def _plain(value: Any) -> str:
    """Return the text of a key, the same for equal values."""
    match value:
        case str():
            return str.__str__(value)  # a member of TextChoices is its value
        case datetime() if value.tzinfo:
            return value.astimezone(UTC).isoformat()
        case Decimal():
            return format(value.normalize(), "f")
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex()
        case _:
            return str(value)


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a transaction is open, other than the one of Django's ``TestCase``, as for ``durable=True``."""
    blocks = connection.atomic_blocks
    return bool(blocks) and not blocks[-1]._from_testcase  # type: ignore[attr-defined]


def refuse_transaction(target: Target[Any]) -> None:
    """
    Make sure that our transaction will be the outermost.

    Raises:
        RuntimeError: One is open already, or autocommit is off.
    """
    connection = connections[target.db]
    if in_transaction(connection):
        raise RuntimeError(
            f"lock_for_update() of {target.label} is inside a transaction of database {target.db!r}, which would "
            "commit after the lock is released, so that the next holder reads old rows. Either move it out of "
            "atomic(): in a view under ATOMIC_REQUESTS, use @locked_view or @transaction.non_atomic_requests. Or keep "
            "the transaction and use select_for_update() in it."
        )
    if not connection.in_atomic_block and not connection.get_autocommit():
        raise RuntimeError(
            f"lock_for_update() of {target.label} needs to commit before it releases, but autocommit is off for "
            f"database {target.db!r}, so that the commit is up to you. Either turn autocommit on, or use "
            "select_for_update()."
        )
