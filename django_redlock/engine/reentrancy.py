"""
Which blocks of a lock are open, and which leases the running code has taken (internal).

A signal handler may raise an exception before the first line of ``__exit__`` runs. A lock object that lives on, such as
a module's, would then count as entered for ever, and its lease would be renewed for ever. So every ``with`` statement
has a :class:`OpenBlock` of its own, which only the statement refers to. Python drops the block when the statement ends,
however it ends, and the lease is then released in the background.

A thread that is inside ``with lock("a"):`` and waits for ``a`` once more would wait for ever, because only that thread
can leave the block. A lease from ``acquire()`` may be released by another thread, so the wait is only suspicious. The
same is true of code that runs elsewhere in a copy of the context: in a thread of ``sync_to_async``, in the event loop
of ``async_to_sync``, or in a task that the code started.
"""

import asyncio
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeAlias
from weakref import ref

from ..core.names import named
from ..core.protocol import EndReason
from ..core.rules import DEFAULT_ALIAS, Wanted
from ..exceptions import printable
from ..runtime.clock import Clock
from .lease import Lease, loss_of
from .watchdog import abandoned

log = logging.getLogger("django_redlock")


class _Thread(threading.local):
    # Both are made in one step each. In an __init__, a signal handler that takes a lock could find one of them missing.
    mark: object = None
    block: Callable[[], "OpenBlock | None"] = staticmethod(lambda: None)  # of the with statement that is about to begin


_thread = _Thread()


def this_thread() -> object:
    """Return an object that stands for the calling thread, and never for another one."""
    # The thread's ident is used again by later threads. Greenlets share the mark if gevent patched threads only after
    # this module had been imported.
    mark = _thread.mark or _thread.__dict__.setdefault("mark", object())
    return threading.get_ident(), mark


def this_task() -> object:
    """Return an object that stands for the running task, and never for another one, without keeping the task alive."""
    task = asyncio.current_task()
    return task and ref(task)


class OpenBlock:
    """
    One ``with`` or ``async with`` statement of a lock: its ``__exit__`` or ``__aexit__``.

    Attributes:
        lock: The lock that is entered.
        lease: The lease that the body runs under.
        who: The thread or task that has entered.
        over: Whether the statement is being left, or was left.
        interruption: Cancels the body when the lock is lost; None if nothing does.
    """

    __slots__ = ("__weakref__", "_leave", "interruption", "lease", "lock", "over", "who")

    def __init__(self, lock: Any, leave: Any) -> None:
        self.lock = lock
        self.lease: Any = None  # a Lease, once the lock was taken
        self.who: object = None
        self.over = False
        self.interruption: Interruption | None = None
        self._leave = leave

    def __call__(self, *about: Any) -> Any:
        """Leave the lock; an ``ExitStack``, which looks at the class, passes the lock first."""
        return self._leave(about[0] if len(about) > 3 else self.lock, self, about[-3])


class Exit:
    """
    The ``__exit__`` or ``__aexit__`` of locks: Python looks it up before it enters a ``with`` statement.

    Args:
        leave: The method that leaves a lock; it gets the block, and the kind of exception that ended the body.
    """

    def __init__(self, leave: Callable[..., Any]) -> None:
        self._leave = leave

    def __get__(self, lock: Any, owner: type | None = None) -> OpenBlock:
        block = OpenBlock(lock, self._leave)
        _thread.block = ref(block)
        return block


class Tie(ref[OpenBlock]):
    """
    Links the lease to its block, and has the lease released if the block is dropped before it was left.

    The callback of the reference is one call into C, so that no signal handler can prevent it.
    """

    __slots__ = ("kept", "lease")

    lease: Lease
    kept: OpenBlock | None

    @property
    def open(self) -> bool:
        """Whether the body runs, or may run."""
        block = self()
        return block is not None and not block.over

    def abandon(self) -> None:
        """Have the lease released in the background; its body was interrupted."""
        self.lease.hold.failed()
        self.lease.hold.abandon()


class OpenBlocks(dict[object, list[Tie]]):
    """The open blocks of one lock, by the thread or task that has entered."""

    def enter(self, block: OpenBlock, lease: Lease, by_hand: bool) -> None:
        """
        Note that a block begins.

        Args:
            block: The block.
            lease: Its lease.
            by_hand: Whether ``__enter__`` was called without a ``with`` statement, so that nothing else keeps *block*.
        """
        tie = Tie(block, abandoned.append)
        tie.lease, tie.kept = lease, block if by_hand else None
        block.lease = lease
        lease.hold.block = lease.hold.block or ref(block)  # the outermost, if the lock is reentrant
        lease.hold.by_hand -= 1
        self.setdefault(block.who, []).append(tie)

    def leave(self, block: OpenBlock) -> None:
        """Forget a block that is left."""
        ties = self.pop(block.who, [])
        if len(ties) > 1 and (others := [tie for tie in ties if tie() is not block]):
            self[block.who] = others

    def tidy(self, who: object) -> None:
        """
        Forget the blocks of *who* whose statement ended without leaving them.

        Their locks are released in the background. So one attempt at the same lock may still find it taken.
        """
        ties = self.pop(who, [])
        inside = [tie for tie in ties if tie.open]
        for tie in ties:
            if not tie.open:
                tie.abandon()
        if inside:
            self[who] = inside

    def leaving(self, who: object, name: str) -> OpenBlock:
        """
        Return the block that *who* leaves by calling ``__exit__``, which may be that of another thread or task.

        A generator may be closed by another thread or task than the one that entered. So a thread or task that has not
        entered leaves for the only one that has.

        Raises:
            RuntimeError: There is no block, or several are possible.
        """
        if who not in self and len(self) > 1:
            raise RuntimeError(
                f"Lock {name!r} is not entered here, but in {len(self)} other tasks or threads. "
                "Leave it where it was entered, or make a lock for each."
            )
        for ties in (self.get(who), *self.values()):
            if ties and (block := ties[-1]()) is not None:
                return block
        raise RuntimeError(f"Lock {name!r} is not entered: there is nothing to leave.")


def entering(lock: object) -> tuple[OpenBlock, bool]:
    """Return the block of the ``with`` statement that enters *lock* in this thread, and whether there is none."""
    block = _thread.block()
    if block is None or block.who is not None or block.lock not in (None, lock):
        return OpenBlock(lock, None), True
    block.lock = lock  # an ExitStack has looked at the class
    return block, False


class Interruption:
    """
    Cancels the body of an ``async with`` block when its lock is lost, but never what comes after the body.

    Args:
        task: The task that has entered.
    """

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        self._task = task
        self._loop = task.get_loop()
        self._before = task.cancelling()  # requests that the task has absorbed and not taken back, as a TaskGroup may
        self._struck = False
        self._over = False

    def __call__(self, lease: object) -> None:
        """Cancel the body soon, whichever thread noticed the loss."""
        with suppress(RuntimeError):  # its loop has been closed
            self._loop.call_soon_threadsafe(self._strike)

    def _strike(self) -> None:
        if not self._over:
            self._struck = True  # first: an exception may arrive as soon as the task has been cancelled
            self._task.cancel()

    def end(self, kind: type[BaseException] | None) -> bool:
        """Note that the body ended, with an exception of *kind*; return whether this interruption ended it."""
        self._over = True
        if not self._struck or asyncio.current_task() is not self._task:
            return False
        return self._task.uncancel() <= self._before and kind is asyncio.CancelledError


OURS = ("django_redlock.", "contextlib", "django.utils.asyncio")

INNER = 3  # frames from remember() to the method of the lock that was called: they are inside this package


def caller_frame(inner: int = 0) -> Any:
    """
    Return the nearest frame outside this package and the standard library's context managers.

    Args:
        inner: How many frames above the caller's are known to be inside this package; they are skipped.
    """
    frame: Any = sys._getframe(inner + 1)
    while (before := frame.f_back) and frame.f_globals.get("__name__", "").startswith(OURS):
        frame = before
    return frame


Chain: TypeAlias = "tuple[ref[Lease], Chain] | None"
"""A lease, and the leases that were taken before it."""

# The leases that were taken in a context and may still be held: the chain, which never changes, because contexts that
# were copied share it; how many leases it has; and how many it may have before those that have ended are dropped. So
# taking a lock costs the same however many others are held.
_taken: ContextVar[tuple[Chain, int, int]] = ContextVar("django_redlock leases", default=(None, 0, 8))


def remember(lease: Lease, who: object) -> None:
    """Remember that a thread or task took a lease: for this context, and for those that are copied from it."""
    frame, hold = caller_frame(INNER), lease.hold
    # Not the number of the line, which Python counts from the first line of a function: only a message needs it.
    hold.taken_by, hold.taken_at = who, (frame.f_code, frame.f_lasti)
    chain, size, limit = _taken.get()
    if size >= limit:
        chain, size = None, 0
        for each in [*_remembered()][::-1]:
            if not each.hold.entered or each.hold.ended is EndReason.RELEASED:
                continue  # a lost one stays: code that asks for it must learn that
            chain, size = (ref(each), chain), size + 1
        limit = max(8, 2 * size)
    _taken.set(((ref(lease), chain), size + 1, limit))


def taken_here() -> list[Lease]:
    """
    Return the leases that were taken in this context and are still held, in the order in which they were taken.

    A loss is not reported here: its callbacks may block, and belong to another thread or event loop.
    """
    found: list[Lease] = []
    for lease in _remembered():
        hold = lease.hold
        if not hold.forked and not hold.ended and hold.clock() < hold.deadline:
            found.append(lease)
    return found[::-1]


def _remembered() -> Iterator[Lease]:
    """Yield the leases that were taken in this context, the last one first, as far as anybody still has them."""
    chain = _taken.get()[0]
    while chain:
        key, chain = chain
        if (lease := key()) is not None:
            yield lease


def current_lease(name: str | None = None, using: str = DEFAULT_ALIAS) -> Lease:
    """
    Return the lease under which the calling code runs, for code that is far from the ``with`` block.

    It knows the leases that were taken in this context and not yet released: by the calling thread or task, or by the
    code that called or started it with a copy of its context, as ``sync_to_async`` and ``asyncio.create_task`` do.
    Those of views, commands and singleton tasks count as well. It makes no network call.

    Args:
        name: The name of the lock, or one of its names; None is the lock that was taken last.
        using: Alias in ``REDLOCK``.

    Raises:
        LockLostError: The lock was lost.
        RuntimeError: It is not held here.
    """
    lost: Lease | None = None
    for lease in _remembered():
        hold = lease.hold
        if hold.keeper.alias != using or hold.keeper.elsewhere or not (name is None or name in hold.names):
            continue
        if not hold.entered or hold.ended is EndReason.RELEASED:
            continue
        if lease.valid():
            return lease
        lost = lost or lease
    if lost:
        raise loss_of(lost)
    what, where = (f"Lock {name!r} is not", repr(name)) if name else ("No lock is", "...")
    raise RuntimeError(
        f"{what} held here. Call this inside 'with lock({where}):', in the same thread or task, or in one that was "
        "started with its context; elsewhere, pass the lease."
    )


def assert_locked(name: str, using: str = DEFAULT_ALIAS) -> None:
    """
    Check that the calling code runs under a lock, by the local clock, without a network call.

    Args:
        name: The name of the lock, or one of its names.
        using: Alias in ``REDLOCK``.

    Raises:
        LockLostError: The lock was lost.
        RuntimeError: It is not held here; see :func:`current_lease`.
    """
    current_lease(name, using)


def forget_taken() -> None:
    """Forget the leases that were taken in this context, because the nodes have forgotten them."""
    _taken.set((None, 0, 8))


class WaitCheck:
    """
    Check before each pause of a thread or task that waits for a lock whether it waits for itself.

    Args:
        manager: The manager of the lock.
        clock: Returns seconds on a steady clock.
        wanted: The lock.
        who: The thread or task.
    """

    def __init__(self, manager: object, clock: Clock, wanted: Wanted, who: object) -> None:
        self._manager = manager
        self._clock = clock
        self._wanted = wanted
        self._who = who
        self._own: Lease | None = None
        self._where = ""
        self._due = math.inf  # when to log the wait; unknown before the first pause
        self._looked = False

    def __call__(self) -> None:
        """
        Look for leases of the same lock before the first pause, and at the clock before all pauses.

        Raises:
            RuntimeError: The thread or task would wait for a block that it is inside.
        """
        if not self._looked:
            self._looked = True
            self._look()
        if self._own and self._clock() >= self._due:
            self._due = math.inf
            name = named(self._wanted.names)
            log.warning(
                "lock %s: the code that waits for it at %s also took it, at %s, or was called or started by the code "
                "that did; if that code waits for this code, both wait for ever",
                printable(name),
                self._where,
                _place(self._own),
                extra={"event": "waits_for_itself", "lock": name},
            )

    def _look(self) -> None:
        own = [lease for lease in taken_here() if self._waits_for(lease)]
        frame = caller_frame()
        self._where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        inside = [lease for lease in own if lease.hold.in_block and lease.hold.taken_by == self._who]
        if self._are_in_the_way(inside):
            hold, wanted = inside[0].hold, self._wanted
            again = (hold.names, hold.shared, hold.limit) == (wanted.names, wanted.shared, wanted.limit)
            raise RuntimeError(
                f"Lock {named(wanted.names)!r} is held by this thread or task itself, since {_place(inside[0])}; "
                f"at {self._where} it would wait for itself. Pass the lease on, "
                f"{'write reentrant=True in both places, or wait=0.' if again else 'or write wait=0.'}"
            )
        if self._are_in_the_way(own):
            self._own, self._due = own[0], self._clock() + self._wanted.ttl

    def _waits_for(self, lease: Lease) -> bool:
        """
        Return whether *lease* is one of those that keep the caller out of the lock.

        Those who share a lock wait for each other, too: this caller waits behind somebody who waits for *lease*.
        """
        same = lease.hold.keeper is self._manager
        return same and not set(lease.hold.names).isdisjoint(self._wanted.names)

    def _are_in_the_way(self, own: list[Lease]) -> bool:
        """Return whether these leases take all permits that the caller could get; one with another limit does."""
        limit = self._wanted.limit
        return len(own) >= limit or any(lease.hold.limit != limit for lease in own)


def _place(lease: Lease) -> str:
    code, instruction = lease.hold.taken_at
    line = next((line for first, after, line in code.co_lines() if first <= instruction < after), None)
    return f"{code.co_filename}:{line or code.co_firstlineno}"
