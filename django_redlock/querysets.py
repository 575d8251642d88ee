"""
Lock rows for a piece of work: the lock goes around the transaction, never the other way round.

A lock that is released inside a transaction lets the next holder read rows that are about to change. The order is
therefore fixed: take the locks of all rows at once, open the outermost transaction and claim the fences of the locks
in it, read the rows again, run the body, check the leases, commit or roll back, release.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, cast, overload

from asgiref.sync import sync_to_async
from django.db import connections
from django.db.models import Model, QuerySet
from django.db.models.manager import BaseManager, Manager
from django.utils.asyncio import async_unsafe

from .core.names import slug
from .core.rules import DEFAULT_ALIAS, UNSET, Wait, check_switch, check_wait, optional_seconds
from .db.targets import Instances, ModelRow, Related, Rows, Target
from .engine.lease import Lease
from .engine.lock import Block, Lock
from .engine.manager import owner_here
from .engine.options import explained
from .exceptions import LockLostError, LockTakenError
from .fencing import fenced, left_to, own_thread
from .handler import in_transaction, locks
from .inventory import State, find_locks
from .nodes.base import run
from .routers import reads_pinned, refuse_reads_elsewhere

M = TypeVar("M", bound=Model)
Many = QuerySet[M] | BaseManager[M] | Sequence[M]
Result = TypeVar("Result")

MYPY = False  # mypy takes it for True: its plugin for Django knows the managers of querysets, and pyright does not
TRIES = 3  # attempts to find related rows that stay the same, or rows that are not locked
COMMITTED = "The transaction had already been committed: its changes are kept, but they may not have been exclusive."


class RowOptions(TypedDict, total=False):
    """The options of :func:`lock_for_update` that go with all others."""

    of: Sequence[str]
    ttl: float | None
    using: str
    route_reads: bool


@overload
def lock_for_update(target: M, *, nowait: bool, **options: Unpack[RowOptions]) -> "RowLock[M]": ...


@overload
def lock_for_update(
    target: M, *, wait: Wait = UNSET, nowait: Literal[False] = False, **options: Unpack[RowOptions]
) -> "RowLock[M]": ...


@overload
def lock_for_update(
    target: Many[M], *, nowait: bool, skip_locked: Literal[False] = False, **options: Unpack[RowOptions]
) -> "RowLock[list[M]]": ...


@overload
def lock_for_update(
    target: Many[M], *, skip_locked: bool, nowait: Literal[False] = False, **options: Unpack[RowOptions]
) -> "RowLock[list[M]]": ...


@overload
def lock_for_update(
    target: Many[M],
    *,
    wait: Wait = UNSET,
    nowait: Literal[False] = False,
    skip_locked: Literal[False] = False,
    **options: Unpack[RowOptions],
) -> "RowLock[list[M]]": ...


@explained
def lock_for_update(
    target: Any,
    *,
    nowait: bool = False,
    skip_locked: bool = False,
    of: Sequence[str] = (),
    wait: Wait = UNSET,
    ttl: float | None = None,
    using: str = DEFAULT_ALIAS,
    route_reads: bool = False,
) -> "RowLock[Any]":
    """
    Lock a row or the rows of a queryset, and work on them in a transaction.

    ``with lock_for_update(order) as order:`` refreshes and returns the instance. A list of instances is refreshed and
    returned in its order. ``with lock_for_update(queryset) as orders:`` returns a list of the rows that match once they
    are locked. Either all rows are locked, or none. The block is the outermost transaction of their database, fenced as
    by :func:`django_redlock.fenced`, and the locks are released after it is committed or rolled back. If the lease is
    lost before the commit, or the database has seen a later holder, the transaction is rolled back.

    ``async with`` does the same in asynchronous code: the queries that the block awaits are part of the transaction.

    Args:
        target: A saved instance, a list of them, a queryset or a manager; at most 200 rows. A slice is locked as
            evaluated.
        nowait: Raise at once if a row is locked; the same as ``wait=0``.
        skip_locked: Leave out the rows that others have locked, instead of waiting. Not for a single instance.
        of: Related rows to lock as well, as foreign keys such as ``("customer", "customer__region")``.
        wait: How long to try, in seconds; 0 means one attempt, None means for ever. If it is not passed,
            ``OPTIONS["wait"]`` applies, None by default.
        ttl: Length of the lease in seconds; None means ``OPTIONS["ttl"]``. The lease is renewed as the settings say.
        using: Alias in ``REDLOCK``, not in ``DATABASES``: the database is the one that the target is written to.
        route_reads: Let the routers of the project choose where the block reads, even if that is a replica. The locked
            rows come from the database that they are written to in any case.

    Raises:
        TypeError: The target is something else, or a queryset that does not yield instances; or *nowait*,
            *skip_locked*, *of* or *route_reads* is of the wrong type.
        ValueError: *ttl* or *wait* is not a number of seconds; an instance is not saved, there are too many instances,
            or they are from several databases; a path of *of* does not lead to a single row; or the options exclude
            each other.

    Entering the block raises ``LockTakenError``, ``QuorumUnavailableError``, ``DoesNotExist`` when an instance is gone,
    ``ValueError`` when there are too many rows, ``RuntimeError`` when a transaction is already open and
    ``ImproperlyConfigured`` when routers send reads elsewhere (both before any lock is taken), and what ``fenced()``
    raises. Leaving the block raises ``LockLostError`` and errors of the database; the
    block's own exception takes precedence.
    """
    if sum(map(bool, (nowait, skip_locked, wait is not UNSET))) > 1:
        raise ValueError("nowait, skip_locked and wait exclude each other; pass only one of them.")
    check_switch("nowait", nowait)
    check_switch("skip_locked", skip_locked)
    check_switch("route_reads", route_reads)
    check_wait(wait)
    optional_seconds("ttl", ttl)
    related = Related(of)
    if isinstance(target, Model):
        chosen: Target = Instances([target], related, single=True)
        if skip_locked:
            raise ValueError(
                "skip_locked needs a queryset or a list, from which a row can be left out; use nowait for an instance."
            )
    elif isinstance(target, list | tuple):
        chosen = Instances(tuple(target), related)  # the caller may change the list in the block
    else:
        chosen = Rows(target.all() if isinstance(target, BaseManager) else target, related)
    return RowLock(chosen, skip_locked, 0 if nowait or skip_locked else wait, ttl, using, route_reads)


class LockableQuerySet(QuerySet[M]):
    """
    A queryset with :meth:`redlock_for_update`.

    Use it as a base class of your own querysets, or as it is: ``objects = LockableQuerySet.as_manager()``.
    """

    if TYPE_CHECKING and not MYPY:

        @classmethod
        def as_manager(cls) -> "LockableManager[Any]":
            """Return a manager with the methods of this queryset."""

    @overload
    def redlock_for_update(
        self, *, nowait: bool, skip_locked: Literal[False] = False, **options: Unpack[RowOptions]
    ) -> "RowLock[list[M]]": ...

    @overload
    def redlock_for_update(
        self, *, skip_locked: bool, nowait: Literal[False] = False, **options: Unpack[RowOptions]
    ) -> "RowLock[list[M]]": ...

    @overload
    def redlock_for_update(
        self,
        *,
        wait: Wait = UNSET,
        nowait: Literal[False] = False,
        skip_locked: Literal[False] = False,
        **options: Unpack[RowOptions],
    ) -> "RowLock[list[M]]": ...

    @explained
    def redlock_for_update(
        self,
        *,
        nowait: bool = False,
        skip_locked: bool = False,
        of: Sequence[str] = (),
        wait: Wait = UNSET,
        ttl: float | None = None,
        using: str = DEFAULT_ALIAS,
        route_reads: bool = False,
    ) -> "RowLock[list[M]]":
        """Return :func:`lock_for_update` of these rows, with the same options; entering it takes the lock."""
        rows: RowLock[list[M]] = lock_for_update(  # type: ignore[call-overload]  # refuses what excludes each other
            self,
            nowait=nowait,
            skip_locked=skip_locked,
            of=of,
            wait=wait,
            ttl=ttl,
            using=using,
            route_reads=route_reads,
        )
        return rows


if TYPE_CHECKING and not MYPY:
    N = TypeVar("N", bound=Model)

    class LockableManager(LockableQuerySet[M], Manager[M]):
        """What ``as_manager()`` returns: a manager of the model that it is an attribute of."""

        def __get__(self, instance: None, cls: type[N]) -> "LockableManager[N]":
            """Return the manager with its model."""


class _MovedError(Exception):
    """A row's related row is no longer the one that was locked with it."""


@dataclass(eq=False, repr=False)
class RowLock(Block[Result]):
    """
    The rows of :func:`lock_for_update`, for one ``with`` or ``async with`` at a time.

    Nothing is locked or read before the block is entered.
    """

    remedy = "call lock_for_update() anew for every block."

    _target: Target
    _skip_locked: bool
    _wait: Wait
    _ttl: float | None
    _using: str
    _route_reads: bool

    def __repr__(self) -> str:
        return f"<RowLock {self._target.label}>"

    def __enter__(self) -> Result:
        refuse_event_loop()
        for _ in range(TRIES):
            with suppress(_MovedError):
                return super().__enter__()
        raise self._unsteady()

    async def __aenter__(self) -> Result:
        for _ in range(TRIES):
            with suppress(_MovedError):
                return await super().__aenter__()
        raise self._unsteady()

    @contextmanager
    def _hold(self) -> Iterator[Result]:
        async def enter(lock: Lock) -> Lease:
            return held.enter_context(lock)

        async def free(rows: list[ModelRow]) -> list[ModelRow]:
            return self._free(rows)

        self._refuse()
        rows = self._target.rows()
        committed = False
        try:
            with ExitStack() as held:
                rows, leases = run(self._take(rows, enter, free))
                with self._reads(), fenced(leases, using=self._target.db, route_reads=True):
                    yield self._read(rows)
                committed = True
        except LockLostError as error:
            if committed:
                error.add_note(COMMITTED)
            raise

    @asynccontextmanager
    async def _ahold(self) -> AsyncIterator[Result]:
        await sync_to_async(self._refuse)()
        committed = False
        try:
            async with own_thread(), AsyncExitStack() as held:
                rows = await sync_to_async(self._target.rows)()
                free = sync_to_async(self._free, thread_sensitive=False)
                rows, leases = await self._take(rows, held.enter_async_context, free)
                with self._reads():
                    async with fenced(leases, using=self._target.db, route_reads=True):
                        yield await sync_to_async(self._read)(rows)
                committed = True
        except LockLostError as error:
            if committed:
                error.add_note(COMMITTED)
            raise

    def _refuse(self) -> None:
        """Raise before any lock is taken if the block could not begin, or would read elsewhere."""
        target, connection = self._target, connections[self._target.db]
        if in_transaction(connection):
            raise RuntimeError(
                f"lock_for_update() of {target.label} is inside a transaction of database {target.db!r}, which would "
                "commit after the lock is released, so that the next holder reads old rows. Either move it out of "
                f"atomic(): in a view under ATOMIC_REQUESTS, use @locked_view instead, or {left_to(target.db)}; in "
                "a migration, set atomic = False. Or keep the transaction, and use select_for_update() in it."
            )
        if not connection.in_atomic_block and not connection.get_autocommit():
            raise RuntimeError(
                f"lock_for_update() of {target.label} needs to commit before it releases, but autocommit is off for "
                f"database {target.db!r}, so that the commit is up to you. Either turn autocommit on, or use "
                "select_for_update()."
            )
        if not self._route_reads:
            refuse_reads_elsewhere("lock_for_update()", [target.db])

    def _reads(self) -> AbstractContextManager[None]:
        """Pin the reads of the block; the routers have been asked by now, so fenced() need not ask them again."""
        return reads_pinned([] if self._route_reads else [self._target.db])

    def _read(self, rows: list[ModelRow]) -> Result:
        if self._target.related:
            locked = {name for row in rows for name in row.names}
            if any(row.names - locked for row in self._target.again(rows)):
                raise _MovedError
        return cast(Result, self._target.read(rows))

    async def _take(
        self,
        rows: list[ModelRow],
        enter: Callable[[Lock], Awaitable[Lease]],
        free: Callable[[list[ModelRow]], Awaitable[list[ModelRow]]],
    ) -> tuple[list[ModelRow], list[Lease]]:
        """
        Take the locks; return the rows that are ours now, and the leases.

        Args:
            rows: The rows to lock.
            enter: Takes a lock that is released with the block.
            free: Does what :meth:`_free` does.
        """
        for _ in range(TRIES):
            try:
                return rows, [await enter(self._lock(rows))] if rows else []
            except LockTakenError:
                if not self._skip_locked:
                    raise
                rows = await free(rows)
        mine: list[ModelRow] = []
        leases: list[Lease] = []
        names: set[str] = set()
        for row in rows:
            lacking = row.names - names  # rows may share related rows
            with suppress(LockTakenError):
                leases += [await enter(self._lock([row], lacking))] if lacking else []
                mine.append(row)
                names |= row.names
        return mine, leases

    def _free(self, rows: list[ModelRow]) -> list[ModelRow]:
        """Return the rows that nobody has locked, as far as the nodes know; query each node once."""
        slugs = {slug(name) for row in rows for name in row.names}
        found = find_locks(slugs, self._using).locks
        busy = {lock.slug for lock in found if lock.state in (State.HELD, State.DEGRADED)}
        return [row for row in rows if busy.isdisjoint(map(slug, row.names))]

    def _lock(self, rows: list[ModelRow], names: Collection[str] = ()) -> Lock:
        """Describe one lock over all *rows*; the manager sorts their names, so two such locks cannot deadlock."""
        names = names or {name for row in rows for name in row.names}
        what = f"{self._target.label} {rows[0].pk}" if len(rows) == 1 else f"{self._target.label}, {len(rows)} rows"
        return locks[self._using].on_behalf(names, owner_here("model", what), ttl=self._ttl, wait=self._wait)

    def _unsteady(self) -> RuntimeError:
        return RuntimeError(
            f"{self!r}: the related rows that of= names were others again each of {TRIES} times that they were locked. "
            "Code that changes the relation should lock its row, too."
        )


@async_unsafe("This would block the event loop. Write 'async with lock_for_update(...):'.")
def refuse_event_loop() -> None:
    """Raise SynchronousOnlyOperation in an event loop, as Django's database does."""
