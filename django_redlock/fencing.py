"""
Transactions in which the database has the last word: it refuses a holder that a later holder has overtaken.

A lease cannot stop a holder that is paused past the lease's end and then continues; only the system that it writes to
can ("How to do distributed locking", Martin Kleppmann, 2016). The first statement of the transaction therefore *claims*
the lease's row in the table of fences: it stores (token, owner) there if the stored pair is smaller or the same, and
keeps the row locked until the end. All reads afterwards return what earlier holders committed, and none of them can
commit later. This needs no clock, no lock and no property of the tokens.
"""

import math
import os
import random
import time
from asyncio import CancelledError
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, Unpack, overload

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q
from django.db.models.functions import Now
from django.db.transaction import TransactionManagementError

from .core.names import is_text
from .core.rules import check_switch, is_whole
from .core.votes import is_quorum
from .db.threads import in_thread, surely_in_thread
from .engine.functions import makes_coroutine, makes_generator, name_of, work_left
from .engine.lease import Lease, fence_out
from .engine.lock import Block
from .engine.options import explained
from .exceptions import StaleTokenError
from .handler import in_transaction
from .models import MAX_SHOWN, Fence, fence_key
from .routers import reads_pinned, refuse_reads_elsewhere

P = ParamSpec("P")
T = TypeVar("T")

ATTEMPTS = 3  # attempts to find a row that was just created; more would help only if rows were deleted constantly
LONGEST_PAUSE = 1.0  # seconds between two runs of a function whose transaction conflicted with another
BATCH = 500  # rows in one statement: older versions of SQLite accept at most 999 values

# Errors of a transaction that conflicted with another one and may be run again: PostgreSQL's SQLSTATE, the numbers of
# MySQL and MariaDB (deadlock; row changed since the snapshot), SQLite's BUSY and LOCKED.
CONFLICT_STATES = {"40001", "40P01"}
CONFLICT_NUMBERS = {1213, 1020}
CONFLICT_CODES = {5, 6}
LOCK_WAIT_TIMEOUT = 1205  # of MySQL and MariaDB

ISOLATION = {
    "postgresql": "SHOW transaction_isolation",
    "mysql": "SELECT @@transaction_isolation",
    "mariadb": "SELECT @@tx_isolation",  # MariaDB knows transaction_isolation only since 11.1
}


class FenceOptions(TypedDict, total=False):
    """The options of :func:`fenced` that go with all others."""

    using: str | Iterable[str]
    margin: float | None
    route_reads: bool


@overload
def fenced(
    lease: Lease | Iterable[Lease], *, retries: int = 0, nested: Literal[False] = False, **options: Unpack[FenceOptions]
) -> "Fenced": ...


@overload
def fenced(lease: Lease | Iterable[Lease], *, nested: bool, **options: Unpack[FenceOptions]) -> "Fenced": ...


@explained
def fenced(
    lease: Lease | Iterable[Lease],
    *,
    using: str | Iterable[str] = DEFAULT_DB_ALIAS,
    margin: float | None = None,
    retries: int = 0,
    nested: bool = False,
    route_reads: bool = False,
) -> "Fenced":
    """
    Run a block, or a function, in a transaction that only the latest holder of a lock can commit.

    ``with lock("report:7") as lease, fenced(lease):`` opens the outermost transaction, claims the lease's fence as its
    first statement, runs the body and commits. Read in the block the values that you write in it: a value that was read
    before may come from an earlier holder. ``fenced(lease, retries=3).run(function, *args)`` does the same around a
    function, and repeats it when the database reports a conflict with another transaction. ``async with`` and
    ``arun()`` do the same in asynchronous code.

    Args:
        lease: An exclusive lease, or several of them; the fences of all their names are claimed. An empty list claims
            none, so the block is an ordinary transaction.
        using: Alias in ``DATABASES``, or several. Each database has a fence of its own, because the fence must live
            with the data. All fences are claimed before the body, in alphabetical order of the aliases; the
            transactions are committed one after the other, in the reverse of that order.
        margin: Seconds of the lease that must be left at the start and at the commit; None means a twentieth of the
            lease's ttl.
        retries: How often ``run()`` and ``arun()`` run the function again after a serialization failure or a deadlock,
            if nothing is committed.
        nested: Allow a transaction around this one, at READ COMMITTED or on SQLite. Values that it read before the
            claim are not protected.
        route_reads: Let the routers of the project choose where the block reads, even if that is a replica. What it
            reads there is not protected.

    Raises:
        TypeError: *lease* is not a lease, *using* is no alias, or *route_reads* is not a bool.
        ValueError: The lease is shared, *using* is empty, *retries* is no whole number, or the options exclude each
            other.

    Entering the block raises ``LockLostError``, ``StaleTokenError`` when the database has seen a later holder (the
    lease is lost then), ``RuntimeError`` when a transaction is already open, ``ImproperlyConfigured`` when the routers
    of the project send reads elsewhere and :class:`~django_redlock.routers.FencedRouter` is not the first of them, and
    errors of the database. Leaving the block raises ``LockLostError`` when the lease has ended or less than the margin
    is left, ``TransactionManagementError`` when the block has caught an error with which the database ended the
    transaction, and errors of the database. If anything is raised, nothing is committed, with three exceptions: an
    error in a callback of ``on_commit()``, a connection that is lost at the end, and, with several databases, a commit
    that fails after others. The error then has a note that says what is committed.
    """
    if isinstance(lease, Lease) or not isinstance(lease, Iterable):
        lease = [lease]
    leases = list(lease)
    for each in leases:
        if not isinstance(each, Lease):
            raise TypeError(
                f"fenced() needs a lease, not {type(each).__name__}; write 'with lock(...) as lease, fenced(lease):'."
            )
        if each.hold.shared:
            raise ValueError(
                f"Lock {each.name!r} is held with shared=True, so several may write at once, and none of them is the "
                "latest. Take it exclusively to write."
            )
    if nested and retries:
        raise ValueError(
            "retries=... and nested=True exclude each other: only the outermost transaction can run again."
        )
    check_switch("route_reads", route_reads)
    if not is_whole(retries, 0, math.inf):
        raise ValueError(f"retries must be a whole number from 0, not {retries!r}.")
    if not isinstance(using, Iterable):
        raise TypeError(f"using must be an alias in DATABASES, or several, not {using!r}.")
    aliases = (str(using),) if is_text(using) else tuple(sorted(set(using)))
    if not aliases:
        raise ValueError("using names no database, so that nothing would be fenced; name at least one.")
    leases.sort(key=lambda each: each.names)  # the same order everywhere: no two blocks wait for each other
    return Fenced(tuple(leases), aliases, margin, retries, nested, route_reads)


@dataclass(eq=False, repr=False)
class Fenced(Block[None]):
    """A transaction behind a fence, as :func:`fenced` describes it; it can be used again, one block at a time."""

    remedy = "call fenced() anew for every block."

    _leases: tuple[Lease, ...]
    _databases: tuple[str, ...]
    _margin: float | None
    _retries: int
    _nested: bool
    _route_reads: bool

    def __repr__(self) -> str:
        return f"<Fenced {', '.join(lease.name for lease in self._leases)}>"

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """
        Call *function* in a transaction of its own, and return its result.

        If the transaction conflicts with another one and ``retries`` are left, *function* is called again with the same
        arguments, as long as nothing is committed. It must therefore have no effects outside the databases of
        ``using``. This method raises what the block raises, and what *function* raises.

        Raises:
            TypeError: *function* cannot be called, or does its work after the call, as a coroutine function does.
        """
        refuse_later_work(function, "run")
        pause = 0.02
        for left in range(self._retries, -1, -1):
            committed: list[str] = []
            try:
                with self._transaction(committed):
                    result = function(*args, **kwargs)
                    if rest := work_left(result):
                        raise TypeError(f"{name_of(function)} returned {rest}, which would run after the transaction.")
                    return result
            except DatabaseError as error:
                if committed or not left or not is_conflict(error):
                    raise
            time.sleep(random.uniform(0, pause))
            pause = min(2 * pause, LONGEST_PAUSE)
        raise AssertionError("unreachable")

    async def arun(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """
        Do what :meth:`run` does, in the thread in which Django's asynchronous interface runs its queries.

        Args:
            function: A plain function, not a coroutine function; no other task's queries come between its own.
            args: The positional arguments of *function*.
            kwargs: The keyword arguments of *function*.
        """
        refuse_later_work(function, "arun")
        return await in_thread(partial(self.run, function, *args, **kwargs))

    def _hold(self) -> AbstractContextManager[None]:
        return self._transaction([])

    @contextmanager
    def _transaction(self, committed: list[str]) -> Iterator[None]:
        """Do what the block does; *committed* gets the databases whose transactions have been, or may be, committed."""
        used: dict[str, object] = {}
        ended: dict[str, DatabaseError] = {}
        try:
            with ExitStack() as opened:
                self._open(opened, committed)
                for alias in self._databases:
                    opened.enter_context(connections[alias].execute_wrapper(partial(note_end, alias, ended)))
                yield
                for alias, error in ended.items():  # which the block has caught
                    raise TransactionManagementError(
                        f"Database {alias!r} has rolled back the transaction because of an error that the block has "
                        "caught, so that its claim is lost. Nothing is committed. Let the error leave the block; "
                        "fenced(lease, retries=...).run(function) then runs the function again."
                    ) from error
                self._check()  # the last thing before COMMIT
                used = {alias: connections[alias].connection for alias in self._databases}
        except BaseException as error:
            unknown = [alias for alias in used if alias not in committed and is_lost(alias, used[alias])]
            if note := self._outcome(committed, unknown):
                error.add_note(note)
            committed += unknown
            raise

    def _outcome(self, committed: list[str], unknown: list[str]) -> str:
        """
        Say what is committed after an error, or nothing if all was rolled back.

        Args:
            committed: The databases whose transactions have been committed.
            unknown: The other databases whose connections were lost at the end of the block.
        """
        rest = [alias for alias in self._databases if alias not in (*committed, *unknown)]
        said = []
        if committed:
            said.append(f"The transaction of {_named(committed)} has been committed: its changes are kept.")
        if unknown:
            named = _named(unknown)
            said.append(f"Whether the transaction of {named} has been committed is not known: its connection was lost.")
        if said and rest:
            said.append(f"That of {_named(rest)} has been rolled back.")
        return " ".join(said)

    @asynccontextmanager
    async def _ahold(self) -> AsyncIterator[None]:
        async with own_thread():
            try:
                await sync_to_async(self.__enter__)()
            except CancelledError as error:
                # The thread continues although the task is cancelled, so this runs after __enter__() has ended.
                end = partial(self.__exit__, type(error), error, error.__traceback__)
                await surely_in_thread(lambda: self.is_entered and end())
                raise
            try:
                yield
            except BaseException as error:
                if not await surely_in_thread(self.__exit__, type(error), error, error.__traceback__):
                    raise
            else:
                await surely_in_thread(self.__exit__, None, None, None)

    def _open(self, stack: ExitStack, committed: list[str]) -> None:
        """
        Begin the transactions, and claim the fences in all of them.

        Args:
            stack: Ends the transactions.
            committed: Gets the alias of each database when its transaction has been committed.
        """
        for alias in self._databases:
            self._refuse(connections[alias])
        if not self._route_reads:
            refuse_reads_elsewhere("fenced()", self._databases)
            stack.enter_context(reads_pinned(self._databases))  # first, so that it includes the on_commit callbacks
        for _ in range(ATTEMPTS):
            self._check()
            with ExitStack() as opened:
                missing = self._begin(opened, committed)
                if not missing:
                    self._check()  # the claim may have waited for an earlier holder's transaction
                    stack.push(opened.pop_all())
                    return
                for alias in self._databases:
                    transaction.set_rollback(True, using=alias)
            # Create fences that any lease can claim, outside the transaction: on InnoDB, an insert after a failed
            # update deadlocks, because both lock the gap.
            for alias, names in missing.items():
                fences = [Fence(key=key, name=name, updated=Now()) for key, name in sorted(names.items())]
                Fence.objects.using(alias).bulk_create(fences, batch_size=BATCH // 5, ignore_conflicts=True)
        raise RuntimeError(
            f"The fence of {self!r} disappears as soon as it is created: something deletes rows of "
            f"{Fence._meta.db_table}."
        )

    def _begin(self, opened: ExitStack, committed: list[str]) -> dict[str, dict[str, str]]:
        """Open the transactions and claim; return, by database, the fences that do not exist, with their names."""
        missing: dict[str, dict[str, str]] = {}
        for alias in self._databases:
            outermost = not connections[alias].in_atomic_block  # not in nested=True, and not in Django's TestCase
            opened.enter_context(transaction.atomic(using=alias, durable=not self._nested))
            if outermost:
                transaction.on_commit(partial(committed.append, alias), using=alias)  # the first callback to run
            with missing_table_explained(alias):
                for lease in self._leases:
                    if lacking := claim(lease, alias):
                        missing.setdefault(alias, {}).update(lacking)
        return missing

    def _check(self) -> None:
        for lease in self._leases:
            lease.ensure(lease.ttl / 20 if self._margin is None else self._margin)

    def _refuse(self, connection: BaseDatabaseWrapper) -> None:
        """
        Make sure that the claim will be the first statement of a transaction that ends with the block.

        Raises:
            RuntimeError: The claim would not be the first statement, the block would not commit, or the transaction
                would keep its own lease from being renewed.
        """
        if connection.vendor == "sqlite":
            self._refuse_own_file(connection)
        if self._nested:
            # Reads after the claim must be no older than the claim, even if the transaction read something before it.
            level = isolation_level(connection)
            if level != "read committed":
                raise RuntimeError(
                    f"nested=True needs READ COMMITTED, and database {connection.alias!r} is at {level.upper()}: a "
                    "statement before the claim fixes what is read after it, so the claim would protect nothing. Move "
                    "fenced() out of atomic()."
                )
        elif in_transaction(connection):
            raise RuntimeError(
                f"fenced() is inside a transaction of database {connection.alias!r}, in which something may have been "
                f"read before the claim. Move it out of atomic(): under ATOMIC_REQUESTS, {left_to(connection.alias)}. "
                "Or write nested=True, and rely on nothing that was read before."
            )
        elif not connection.in_atomic_block and not connection.get_autocommit():
            raise RuntimeError(
                f"fenced() commits at its end, but autocommit is off for database {connection.alias!r}, so that the "
                "commit is up to you and a transaction may be open already. Turn autocommit on."
            )

    def _refuse_own_file(self, connection: BaseDatabaseWrapper) -> None:
        file = os.path.realpath(connection.settings_dict["NAME"])
        for lease in self._leases:
            manager = lease.hold.keeper
            others = sum(getattr(node, "file", "") != file for node in manager.nodes)
            if lease.hold.renewed and not is_quorum(others, manager.rules.needed):
                raise RuntimeError(
                    f"The transaction of database {connection.alias!r} would keep lock {lease.name!r} from being "
                    "renewed: its file is the node of the lock, and SQLite has one writer at a time. Give the locks a "
                    "database file of their own in DATABASES and NODES, or use a database server."
                )

    def _refuse_nesting(self) -> None:
        if self._retries:
            raise ValueError("A block cannot be run again: write fenced(lease, retries=...).run(function).")
        super()._refuse_nesting()


def claim(lease: Lease, using: str) -> dict[str, str]:
    """
    Claim the fences of a lease in the open transaction; return those that could not be updated, with their names.

    Args:
        lease: The holder.
        using: Alias in ``DATABASES``.

    Raises:
        StaleTokenError: The database has seen a later holder; the lease is lost now.
    """
    number, owner = lease.fencing_token, lease.hold.owner()
    fences = {fence_key(name, permit): shown(name, permit) for name, permit in lease.hold.slots()}
    keys = sorted(fences)
    missing: dict[str, str] = {}
    for first in range(0, len(keys), BATCH):
        some = keys[first : first + BATCH]
        rows = Fence.objects.using(using).filter(pk__in=some)
        claimable = Q(token__lt=number) | Q(token=number, owner=owner)
        if rows.filter(claimable).update(token=number, owner=owner, updated=Now()) == len(some):
            continue
        found = {key: (seen, by) for key, seen, by in rows.values_list("key", "token", "owner")}
        overtaken = [seen for seen, by in found.values() if seen >= number and (seen, by) != (number, owner)]
        if overtaken:
            fence_out(lease, max(overtaken))
            raise StaleTokenError(lease.name, number)
        # A fence that this query finds but the update did not may be unclaimed, or claimed by this lease in another
        # thread. Either way, this transaction does not hold it.
        missing |= {key: fences[key] for key in [key for key in some if key not in found] or some}
    return missing


def shown(name: str, permit: str) -> str:
    """Return a lock's name in a form that people can read in the table."""
    text = f"{name} #{permit}" if permit else name
    text = text.replace("\0", "�")  # PostgreSQL cannot store NUL
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def isolation_level(connection: BaseDatabaseWrapper) -> str:
    """Return a connection's isolation level, such as "read committed"; for an unknown database, return its vendor."""
    statement = ISOLATION.get("mariadb" if getattr(connection, "mysql_is_mariadb", False) else connection.vendor)
    if statement is None:
        # SQLite refuses a write in a transaction whose reads are out of date, so a claim proves that they are current.
        return "read committed" if connection.vendor == "sqlite" else connection.vendor
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return str(cursor.fetchone()[0]).lower().replace("-", " ")


def left_to(alias: str) -> str:
    """Return what leaves the transactions of a database to the view, for a message."""
    return f"mark what the URL leads to (of a class, dispatch()) with @transaction.non_atomic_requests({alias!r})"


def is_lost(alias: str, used: object) -> bool:
    """
    Return whether the connection of a transaction that has ended was lost at its end.

    Either Django replaced it, or could not turn autocommit on again, as when it was lost just after COMMIT.
    """
    connection = connections[alias]
    to_turn_on = connection.commit_on_exit and not connection.in_atomic_block  # not inside another transaction
    return connection.connection is not used or (to_turn_on and not connection.autocommit)


def _named(aliases: list[str]) -> str:
    return f"{'database' if len(aliases) == 1 else 'databases'} {' and '.join(map(repr, aliases))}"


def refuse_later_work(function: object, method: str) -> None:
    """
    Make sure that *function* does its work during the call, inside the transaction.

    Raises:
        TypeError: *function* cannot be called, or makes a coroutine or generator.
    """
    if not callable(function):
        raise TypeError(f"{method}() needs a function and its arguments, not {repr(function)[:40]}; do not call it.")
    if makes_coroutine(function) or makes_generator(function):
        name, kind = name_of(function), "coroutine" if makes_coroutine(function) else "generator"
        raise TypeError(
            f"{method}() needs a plain function, and {name} is a {kind} function; use 'async with' or 'with' inside it."
        )


def note_end(alias: str, ended: dict[str, DatabaseError], execute: Callable[..., T], *query: Any) -> T:
    """
    Execute a query; if its error has ended the whole transaction, let nothing more be written in it.

    The claim has ended with the transaction, so that a later holder may write in between. Django notices that only if
    the query was a write of its own.

    Args:
        alias: The alias of the database.
        ended: Gets the error.
        execute: Executes the query.
        query: The query, as Django's ``execute_wrapper()`` passes it.
    """
    try:
        return execute(*query)
    except DatabaseError as error:
        # Django's own error is about an earlier one, which says why, and no query can be sent after it.
        if not isinstance(error, TransactionManagementError) and has_ended(connections[alias], error):
            transaction.set_rollback(True, using=alias)
            ended[alias] = error
        raise


def has_ended(connection: BaseDatabaseWrapper, error: DatabaseError) -> bool:
    """Return whether an error has ended the transaction; PostgreSQL's only refuses everything from then on."""
    if connection.vendor == "sqlite":
        return not connection.connection.in_transaction
    if connection.vendor != "mysql":
        return False
    cause = error.__cause__ or error
    if cause.args and cause.args[0] == LOCK_WAIT_TIMEOUT:  # as a rule, it ends the statement alone
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@innodb_rollback_on_timeout")
            return bool(cursor.fetchone()[0])
    return is_conflict(error)


def is_conflict(error: BaseException) -> bool:
    """Return whether a database error means that the transaction conflicted with another one and may be run again."""
    cause = error.__cause__ or error
    state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    number = cause.args[0] if cause.args else None
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF  # the low byte is the error; the other bits only refine it
    return state in CONFLICT_STATES or number in CONFLICT_NUMBERS or code in CONFLICT_CODES


@contextmanager
def missing_table_explained(alias: str) -> Iterator[None]:
    """Raise an error that says what to type if the database has no table of fences."""
    try:
        yield
    except DatabaseError as error:
        if is_conflict(error) or "redlock_fence" not in str(error):
            raise
        # Open a separate connection: the one with the failed transaction accepts no query until the rollback.
        connection = connections[alias].copy()
        missing = False
        try:
            with suppress(DatabaseError):
                missing = Fence._meta.db_table not in connection.introspection.table_names()
        finally:
            connection.close()
        if not missing:
            raise
        raise ImproperlyConfigured(
            f"Database {alias!r} has no table {Fence._meta.db_table}: put 'django_redlock' into INSTALLED_APPS and "
            f"type manage.py migrate redlock --database {alias}"
        ) from error


@asynccontextmanager
async def own_thread() -> AsyncIterator[None]:
    """
    Run a task's database calls in a thread of its own, unless its request has one.

    In the thread that all tasks share, the queries of other tasks would become part of the transaction. Below
    ``async_to_sync()``, as in Django's ``TestCase``, the thread of the blocking caller is used.
    """
    outside = await sync_to_async(get_ident)()
    async with ThreadSensitiveContext():
        own = outside != await sync_to_async(get_ident)()
        try:
            yield
        finally:
            if own:  # the thread ends with this block, and nothing else would close its connections
                await surely_in_thread(connections.close_all)
