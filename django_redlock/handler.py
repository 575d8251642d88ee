"""
The lock managers of the aliases in ``REDLOCK``, one per alias and process, and access to them.
"""

import os
import sys
import threading
import warnings
from asyncio import _get_running_loop
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from django.conf import settings
from django.core.signals import setting_changed
from django.utils.asyncio import async_unsafe

from . import signals
from .conf import UnknownAliasError, aliases, read_alias
from .core.names import named
from .core.rules import DEFAULT_ALIAS, Rules
from .engine.lease import Lease, release_at_end
from .engine.lock import Lock
from .engine.manager import LockManager, Surroundings
from .engine.options import BlockOptions, SkippingOptions, lists_options, plan
from .engine.reentrancy import caller_frame
from .nodes import backends

if TYPE_CHECKING:
    from .engine.lock import SkippingLock


class RedlockHandler:
    """
    Give out the lock manager configured under each alias of ``REDLOCK``.

    There is one manager per alias and process, because a manager owns connections. Django's ``BaseConnectionHandler``
    would make one per thread and per asyncio task. Settings are read at the first use of an alias.
    """

    def __init__(self) -> None:
        self._managers: dict[str, LockManager] = {}  # what is given out
        self._made: dict[str, LockManager] = {}  # from the settings
        self._substitutes: list[tuple[str, LockManager]] = []
        self._mutex = threading.RLock()

    def __getitem__(self, alias: str) -> LockManager:
        """
        Return the manager of an alias.

        Raises:
            InvalidRedlockError: The setting has no such alias or cannot be used.
        """
        try:
            return self._managers[alias]
        except KeyError:
            # Other threads wait for the one that makes the manager. A signal handler that interrupts that thread may
            # need the manager itself, so it may enter; the manager that is made first is then used by both.
            with self._mutex:
                managers, made = self._managers, self._made  # read here: a reset makes new ones
                if alias not in managers:
                    managers.setdefault(alias, made.setdefault(alias, self._create(alias)))
                return managers[alias]
        except TypeError:  # it cannot be a key
            raise UnknownAliasError(f"An alias of REDLOCK is a str, not {type(alias).__name__}.") from None

    def __iter__(self) -> Iterator[str]:
        return iter(aliases())

    if not TYPE_CHECKING:

        def __getattr__(self, attribute: str) -> Any:
            raise AttributeError(f"locks has no {attribute!r}; write locks['default'] to use an alias of REDLOCK.")

    def all(self) -> list[LockManager]:
        """Return the managers of all aliases."""
        return [self[alias] for alias in self]

    def reset(self) -> None:
        """Forget all managers and close their idle connections; the next use reads the settings anew."""
        with self._mutex:
            made, self._made = self._made, {}
            self._replace()
        for manager in made.values():
            manager.close()

    @contextmanager
    def substituted(self, alias: str, manager: LockManager) -> Iterator[None]:
        """Give out *manager* for an alias in the ``with`` block; for :mod:`django_redlock.testing`."""
        substitute = (alias, manager)
        with self._mutex:
            self._substitutes.append(substitute)
            self._replace()
        try:
            yield
        finally:
            with self._mutex:
                self._substitutes.remove(substitute)
                self._replace()

    def _replace(self) -> None:
        """Give out other managers, and have the locks of those that are no longer given out look theirs up again."""
        before, self._managers = self._managers, {**self._made, **dict(self._substitutes)}
        for manager in before.values():
            manager.replaced = True
        for manager in self._managers.values():
            manager.replaced = False

    def _create(self, alias: str) -> LockManager:
        config = read_alias(alias)
        manager = LockManager(config.nodes, config.rules, alias=alias)
        manager.notify = partial(signals.send, manager)
        manager.surroundings = DjangoSurroundings()
        return manager


class DjangoSurroundings(Surroundings):
    """The event loop and the transactions of the calling thread, as Django knows them."""

    def blocking(self) -> None:
        """Raise SynchronousOnlyOperation in an event loop, as Django's database does."""
        if _get_running_loop() is not None:
            _refuse_event_loop()

    def entering(self, names: tuple[str, ...], rules: Rules, on_commit: bool = False) -> None:
        """Warn or raise, as ``OPTIONS["in_transaction"]`` says, if a transaction is open."""
        if on_commit:
            _refuse_manual_commits(named(names))
            return
        if rules.in_transaction == "allow" or not (open_ones := open_transactions()):
            return
        message = (
            f"Lock {named(names)!r} is entered inside a transaction of database {open_ones[0].alias!r}, and would be "
            "released before the commit: the next holder would not see what was written. Enter the lock first and the "
            "transaction inside it, or write lock(..., on_commit=True). In a view under ATOMIC_REQUESTS use "
            "@locked_view; in a migration, atomic = False. OPTIONS['in_transaction'] = 'allow' silences this."
        )
        if rules.in_transaction == "error":
            raise RuntimeError(message)
        frame = caller_frame()
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        module = frame.f_globals.get("__name__", "")
        warnings.warn_explicit(message, RuntimeWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)

    def keep(self, lease: Lease) -> bool:
        """Release *lease* when the last open transaction has ended; return whether a transaction is open."""
        open_ones = open_transactions()
        if open_ones:
            release = ReleaseAfterTransactions(lease, len(open_ones))
            for connection in open_ones:
                # Not on_commit(), whose callbacks are dropped with the savepoint that they were registered in.
                connection.run_on_commit.append((set(), release, True))
        return bool(open_ones)


@async_unsafe(
    "This would block the event loop. Write 'async with lock(...)', await a method that begins with 'a', such as "
    "aacquire() or aextend(), or decorate a coroutine function."
)
def _refuse_event_loop() -> None:
    """Raise, unless DJANGO_ALLOW_ASYNC_UNSAFE is set."""


class ReleaseAfterTransactions:
    """
    Release a lease when the last of several transactions has ended.

    Django calls this object after a commit. After a rollback, or when the connection is closed, Django only drops it.
    """

    def __init__(self, lease: Lease, transactions: int) -> None:
        self._lease: Lease | None = lease
        self._left = transactions
        lease.hold.kept += 1

    def __call__(self) -> None:
        """Count a commit."""
        self._left -= 1
        if not self._left:
            self._release()

    def __del__(self) -> None:
        self._release()

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.hold.kept -= 1
            release_at_end(lease)


def open_transactions() -> list[Any]:
    """Return the connections of this thread that have an open transaction, other than that of a ``TestCase``."""
    db = sys.modules.get("django.db")  # not imported: a process that has not loaded it has no transaction
    return [each for each in db.connections.all(initialized_only=True) if in_transaction(each)] if db else []


def in_transaction(connection: Any) -> bool:
    """Return whether a transaction is open, other than the one of Django's ``TestCase``, as for ``durable=True``."""
    blocks = connection.atomic_blocks
    return bool(blocks) and not blocks[-1]._from_testcase


def _refuse_manual_commits(name: str) -> None:
    """
    Make sure that Django learns of every commit.

    Raises:
        RuntimeError: Autocommit is off for a database.
    """
    db = sys.modules.get("django.db")  # not imported, as in open_transactions()
    for each in db.connections.all() if db else ():
        autocommit = each.settings_dict["AUTOCOMMIT"] if each.connection is None else each.autocommit
        # Inside atomic(), Django switches autocommit off itself; commit_on_exit tells whether it was on before.
        if not (each.commit_on_exit if each.in_atomic_block else autocommit):
            raise RuntimeError(
                f"Lock {name!r} has on_commit=True, but autocommit is off for database {each.alias!r}, so that Django "
                "learns of no commit. Either turn autocommit on, or leave on_commit out and commit inside the lock."
            )


locks = RedlockHandler()
"""``locks["alias"]`` is the :class:`~django_redlock.engine.manager.LockManager` of an alias of ``REDLOCK``."""


@overload
def lock(
    name: str | Iterable[str],
    *,
    using: str = DEFAULT_ALIAS,
    if_taken: Literal["skip"],
    **options: Unpack[SkippingOptions],
) -> "SkippingLock": ...


@overload
def lock(
    name: str | Iterable[str],
    *,
    using: str = DEFAULT_ALIAS,
    if_taken: Literal["raise"] = "raise",
    **options: Unpack[BlockOptions],
) -> Lock: ...


@lists_options
def lock(name: str | Iterable[str], *, using: str = DEFAULT_ALIAS, **options: Any) -> Lock:
    """
    Describe a lock of an alias, without reading settings or making a network call before it is acquired.

    ``with lock("report:7"):`` and ``async with lock("report:7"):`` run their body under the lock, and
    ``@lock("report")`` runs a function or coroutine function under it.

    Args:
        name: What to lock, or several names to lock all or none of.
        ttl: Length of the lease in seconds; None is ``OPTIONS["ttl"]``, 30 by default.
        wait: How long to try in seconds; 0 is one attempt, None is for ever. If it is not passed, it is
            ``OPTIONS["wait"]``, None by default. If the vote is split between contenders, so that nobody has the lock,
            the contenders go on until one of them has it, for up to four node timeouts.
        using: Alias in ``REDLOCK``.
        renew: Whether to extend the lease while it is held; None is ``OPTIONS["renew"]``, True by default.
        label: The holder's work, for people who look at held locks; never put a secret here.
        limit: How many callers may hold it at once, from 1 to 1000; all of them must pass the same number.
        shared: Whether other shared holders may hold it at the same time. Without it a holder is exclusive.
        reentrant: Whether the thread or task that holds it may take it again, without a network call.
        barge: Whether to ignore the queue and take the lock at once if it is free.
        heartbeat: Seconds without ``lease.heartbeat()`` after which the lease is no longer extended, for work that may
            hang while its process lives; None requires no heartbeat.
        max_hold: The longest time for which the lock is renewed, in seconds; None is ``OPTIONS["max_hold"]``, an hour
            by default.
        hold_for: The least time for which the lock stays taken, in seconds from its acquisition, also if the work or
            its process ends earlier, however it ends; 0 ends the lock with its work. The nodes keep the lock, and no
            process renews it. It may be longer than ``max_ttl`` and *max_hold*, which bound the lease alone.
        hold_on_error: Whether an exception that ends the block leaves the lock taken, too. Without it, the lock is free
            then. It makes no difference to a process that is killed, whose lock stays taken.
        cancel_on_lost: Whether to cancel the body of ``async with`` when the lock is lost; the block then raises
            LockLostError.
        on_commit: Whether a ``with`` block inside a transaction keeps the lock until the transaction has been committed
            or rolled back; outside a transaction it makes no difference. It does not work with ``async with`` or
            ``acquire()``.
        if_taken: Whether a decorated function raises LockTakenError when the lock is taken (``raise``) or returns None
            (``skip``). With ``skip`` it makes one attempt unless *wait* is passed.
        release: Whether leaving a block waits for the nodes' replies to the release (``wait``) or sends the release and
            returns at once (``send``); None is ``OPTIONS["release"]``, ``wait`` by default.

    Raises:
        TypeError: A name is not a string.
        ValueError: A number cannot work, or two arguments cannot be combined; the message says what to write.

    Acquiring the lock raises ``InvalidRedlockError`` if the settings cannot be used, and ``ValueError`` if they do not
    allow the ttl.
    """
    planned = plan(name, options)  # type: ignore[arg-type]  # the overloads say which options there are
    return Lock(planned, lambda plan: locks[using].describe(plan))


def _on_setting_changed(*, setting: str, **kwargs: Any) -> None:
    if setting in ("REDLOCK", "CACHES"):
        locks.reset()


@cache
def _load() -> None:
    """Import what the locks of a forked child will need, so that all children share its memory; connect to nothing."""
    backends.forking = True
    with suppress(Exception):  # the settings cannot be used, as the child's first lock will say
        for alias in aliases():
            read_alias(alias)
    backends.forking = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _load() if settings.configured else None,
        # Another thread of the parent may have held the mutex.
        after_in_child=lambda: setattr(locks, "_mutex", threading.RLock()),
    )

setting_changed.connect(_on_setting_changed, dispatch_uid="django_redlock.reset")
