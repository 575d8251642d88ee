"""
Locks, blocking and asyncio side by side: drivers of the decisions in :mod:`django_redlock.core`.

A :class:`Lock` describes what to lock; it can be kept and used from any thread or task. Acquiring it gives a
:class:`Lease`, the proof of holding it. A :class:`LockManager` owns the nodes and connections of one alias.
"""

import asyncio
import atexit
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict
from functools import wraps
from inspect import iscoroutinefunction
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from .core.acquisition import Acquisition, Floor, GaveUp, Granted, Pause, Step, Wanted, farewell
from .core.admission import Admission
from .core.messages import Ballot, Instant, Reply, Survey
from .core.names import check_names, slug
from .core.owner import Owner, decode
from .core.rules import MIN_TTL, Rules, number, seconds
from .core.tenure import Tenure, release_outcome
from .exceptions import LockLostError, LockTakenError, QuorumUnavailableError
from .nodes import Node
from .nodes.aio import AsyncGather
from .nodes.gather import Gather, steady
from .watchdog import loop_watchdog, watchdog

Function = TypeVar("Function", bound=Callable[..., Any])
Notify = Callable[..., None]

log = logging.getLogger("django_redlock")
_HOST = socket.gethostname()


def fresh_nonce() -> str:
    """Return 128 random bits as 32 hexadecimal digits."""
    return os.urandom(16).hex()


def instant() -> Instant:
    """Read the clocks."""
    return Instant(steady(), time.time_ns() // 1000)


def silent(event: str, **about: Any) -> None:
    """Notify nobody."""


class Lease:
    """
    Proof that a quorum of nodes granted a lock, for as long as it is valid.

    Validity comes from the clock alone: the ttl counts from before the first byte of the request was sent, less the
    allowance for drift ("Distributed Locks with Redis", "The Redlock Algorithm", step 3). A lease that ended stays
    ended.
    """

    def __init__(
        self,
        manager: "LockManager",
        tenure: Tenure,
        renew: bool,
        lost: threading.Event | asyncio.Event,
    ) -> None:
        self._manager = manager
        self._tenure = tenure
        self._renew = renew
        self._lost = lost
        self._callbacks: list[Callable[[Lease], object]] = []
        self._mutex = threading.Lock()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<Lease {self.name!r}: {self._tenure.ended or f'{self.remaining():.1f} s left'}>"

    def __reduce__(self) -> Any:
        raise TypeError("A Lease cannot be pickled or copied: the lock would have two holders.")

    @property
    def name(self) -> str:
        """The lock's name; several names are joined by commas."""
        return ", ".join(self._tenure.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are locked, sorted."""
        return self._tenure.names

    @property
    def fencing_token(self) -> int:
        """A number greater than that of every earlier holder of any of the names."""
        return self._tenure.token

    @property
    def token(self) -> str:
        """The secret that extends and releases this lock: 32 hexadecimal digits. Never show it."""
        return self._tenure.nonce

    @property
    def reason(self) -> str | None:
        """Why it ended: ``released``, ``expired``, ``superseded``, ``max_hold``, ``max_extensions`` or ``forked``."""
        return "forked" if self._forked() else self._tenure.ended

    @property
    def extensions(self) -> int:
        """How often it has been extended."""
        return self._tenure.extensions

    @property
    def lost(self) -> Any:
        """
        An event that is set when the lease ends without having been released.

        A :class:`threading.Event`, or an :class:`asyncio.Event` for a lease acquired with ``aacquire()`` or
        ``async with``.
        """
        return self._lost

    def remaining(self) -> float:
        """Return the seconds of validity left; 0.0 when it ended."""
        return self._tenure.remaining(steady()) if self.valid() else 0.0

    def valid(self) -> bool:
        """Return whether the lock is still held, by the local clock; asks no node."""
        if self._forked():
            return False
        if self._tenure.check(steady()):
            return True
        self._tell_loss()
        return False

    def ensure(self) -> None:
        """
        Check that the lock is still held, by the local clock; asks no node.

        Raises:
            LockLostError: It is not.
        """
        if not self.valid():
            raise self._loss()

    def on_lost(self, callback: Callable[["Lease"], object]) -> None:
        """
        Call *callback* with this lease once if it is lost; at once if it already was.

        It is called from the watchdog's thread, or in the event loop of an asyncio lease.
        """
        with self._mutex:
            self._callbacks.append(callback)
        if self._lost.is_set():
            self._call_back()

    def extend(self) -> bool:
        """
        Ask the nodes for a whole ttl from now; returns whether a quorum agreed before the old deadline.

        Needed only with ``renew=False``. Blocks for at most one node timeout.
        """
        ballot = self._extension()
        if ballot is None:
            return False
        start = steady()
        self._manager.ask(ballot)
        return self._extended(ballot, start)

    async def aextend(self) -> bool:
        """Do what :meth:`extend` does without blocking."""
        ballot = self._extension()
        if ballot is None:
            return False
        start = steady()
        await self._manager.aask(ballot)
        return self._extended(ballot, start)

    def release(self) -> str:
        """
        Give the lock up; returns what the nodes say of it.

        ``released``: it was ours until now. ``expired``: it had ended. ``taken``: somebody else has it.
        ``unknown``: too few nodes answered within the node timeout; it ends with its ttl at the latest. Never
        raises for a lock that is gone, and may be called twice.
        """
        ballot = self._end()
        if ballot is None:
            return "expired" if not self._forked() else "unknown"
        watchdog.forget(self)
        self._manager.ask(ballot)
        return self._ended(ballot)

    async def arelease(self) -> str:
        """Do what :meth:`release` does without blocking; a cancelled call has sent the release all the same."""
        ballot = self._end()
        if ballot is None:
            return "expired" if not self._forked() else "unknown"
        loop_watchdog().forget(self)
        await self._manager.aask(ballot)
        return self._ended(ballot)

    # What the watchdog calls

    def due(self) -> float:
        """Return when the watchdog looks at it next."""
        return float("inf") if self._tenure.ended else self._tenure.due(self._renew)

    def tend(self) -> None:
        """Extend it if it is renewed and its time has come; notice its end."""
        if self.valid() and self._renew:
            self.extend()
        if not self.valid():
            watchdog.forget(self)

    async def atend(self) -> None:
        """Do what :meth:`tend` does without blocking."""
        if self.valid() and self._renew:
            await self.aextend()
        self.valid()

    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def _extension(self) -> Ballot | None:
        return self._tenure.extension(steady()) if self.valid() else None

    def _extended(self, ballot: Ballot, start: float) -> bool:
        longer = self._tenure.extended(ballot, start, steady())
        if self._tenure.ended:
            self._tell_loss()
        if longer:
            self._manager.notify("lock_extended", lease=self)
        return longer

    def _end(self) -> Ballot | None:
        """Mark it ended, before the first byte of the release is sent; returns the round to carry out."""
        if self._forked() or self._tenure.ended == "released":
            return None
        if self._tenure.check(steady()):
            self._tenure.end("released", steady())
        else:
            self._tell_loss()
        return self._tenure.release(self._manager.rules.timeout(self._tenure.ttl))

    def _ended(self, ballot: Ballot) -> str:
        outcome = release_outcome(ballot, self._manager.rules)
        if self._tenure.ended == "released":
            self._manager.notify("lock_released", lease=self, outcome=outcome)
        return outcome if self._tenure.ended == "released" else "taken" if outcome == "taken" else "expired"

    def _tell_loss(self) -> None:
        """Tell of an end that was no release, once, whoever noticed it."""
        if self._tenure.ended == "released" or self._lost.is_set():
            return
        with self._mutex:
            if self._lost.is_set():
                return
            self._set_lost()
        log.error("lock lost: %s (%s)", self.name, self.reason, extra={"event": "lock_lost", "lock": self.name})
        self._manager.notify("lock_lost", lease=self, reason=self.reason)
        self._call_back()

    def _set_lost(self) -> None:
        self._lost.set()

    def _call_back(self) -> None:
        with self._mutex:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                log.exception("a callback of lock %s failed", self.name)

    def _loss(self) -> LockLostError:
        return LockLostError(self.name, self.reason or "expired", self._tenure.held(steady()))

    def _leave(self, outcome: str, body_failed: bool) -> None:
        """Raise the loss at the end of a ``with`` block, unless the body raised: then its exception counts."""
        if outcome in ("expired", "taken") and not body_failed:
            if self._tenure.ended == "released":
                self._tenure.ended = "superseded"
            raise self._loss()


class AsyncLease(Lease):
    """A lease whose events belong to the event loop that acquired it."""

    def __init__(self, manager: "LockManager", tenure: Tenure, renew: bool) -> None:
        super().__init__(manager, tenure, renew, asyncio.Event())
        self._loop = asyncio.get_running_loop()

    def _set_lost(self) -> None:
        self._lost.set()
        if asyncio._get_running_loop() is not self._loop and not self._loop.is_closed():
            # Noticed in another thread: the event is set, but those that wait for it must be woken in their loop.
            self._loop.call_soon_threadsafe(self._lost.set)


class Lock:
    """
    What to lock and how. Holds nothing itself: every acquisition gives a :class:`Lease` of its own.

    Use it as ``with`` or ``async with``, as a decorator of a function or coroutine function, or call
    :meth:`acquire`. Made by :func:`django_redlock.lock` or :meth:`LockManager.lock`.
    """

    def __init__(self, manager: "LockManager", wanted: Wanted, renew: bool) -> None:
        self._manager = manager
        self._wanted = wanted
        self._renew = renew
        self._entered: dict[object, Lease] = {}

    def __repr__(self) -> str:
        return f"<Lock {self.name!r}>"

    @property
    def name(self) -> str:
        """The lock's name; several names are joined by commas."""
        return ", ".join(self._wanted.names)

    def acquire(self) -> Lease:
        """
        Take the lock, blocking for at most ``wait`` seconds and one node timeout.

        Raises:
            LockTakenError: Another owner kept it.
            QuorumUnavailableError: Too few nodes answered.
        """
        acquisition = self._manager.acquisition(self._wanted)
        granted = self._manager.run(acquisition)
        return self._manager.held(self._wanted, granted, self._renew)

    async def aacquire(self) -> Lease:
        """Do what :meth:`acquire` does without blocking; a cancelled call leaves no key behind."""
        acquisition = self._manager.acquisition(self._wanted)
        granted = await self._manager.arun(acquisition)
        return self._manager.aheld(self._wanted, granted, self._renew)

    def __enter__(self) -> Lease:
        return self._enter(threading.get_ident(), self.acquire)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._entered.pop(threading.get_ident())
        if lease.reason != "released":  # else the body gave it up, and was told the outcome
            lease._leave(lease.release(), body_failed=kind is not None)

    async def __aenter__(self) -> Lease:
        task = asyncio.current_task()
        self._refuse_nesting(task)
        lease = await self.aacquire()
        self._entered[task] = lease
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._entered.pop(asyncio.current_task())
        if lease.reason != "released":
            lease._leave(await lease.arelease(), body_failed=kind is not None)

    def __call__(self, function: Function) -> Function:
        """Return *function* so that every call of it runs under this lock."""
        if iscoroutinefunction(function):

            @wraps(function)
            async def alocked(*args: Any, **kwargs: Any) -> Any:
                async with self:
                    return await function(*args, **kwargs)

            return alocked  # type: ignore[return-value]

        @wraps(function)
        def locked(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return locked  # type: ignore[return-value]

    def _enter(self, who: object, acquire: Callable[[], Lease]) -> Lease:
        self._refuse_nesting(who)
        lease = acquire()
        self._entered[who] = lease
        return lease

    def _refuse_nesting(self, who: object) -> None:
        if who in self._entered:
            raise RuntimeError(
                f"Lock {self.name!r} is already entered here; it would wait for itself. Pass the lease on instead."
            )


class LockManager:
    """
    The locks of one alias: its nodes, connections and numbers. One per alias and process.

    Args:
        nodes: The nodes that vote.
        rules: How to count and how long to wait.
        alias: Its name in the settings.
        notify: Called with an event's name and what it is about, for signals.
        sleep: Blocks the calling thread for so many seconds.
        asleep: Does the same for a task.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        rules: Rules,
        *,
        alias: str = "default",
        notify: Notify = silent,
        sleep: Callable[[float], None] = time.sleep,
        asleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    ) -> None:
        self.alias = alias
        self.nodes = tuple(nodes)
        self.rules = rules
        self.notify = notify
        self._sleep = sleep
        self._asleep = asleep
        self._floor = Floor()
        self.admission = Admission(rules, tuple(node.name for node in self.nodes), steady)
        self._gather = Gather(self.nodes, self.admission)
        self._gathers: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncGather] = WeakKeyDictionary()
        self._pid = os.getpid()
        _managers.add(self)

    def __repr__(self) -> str:
        return f"<LockManager {self.alias!r}: {', '.join(node.name for node in self.nodes)}>"

    def lock(
        self,
        name: str | Iterable[str],
        *,
        ttl: float | None = None,
        wait: float | None = None,
        renew: bool | None = None,
        label: str = "",
        ref: str = "",
        kind: str = "manual",
        token: str = "",
        adopt: str = "",
        detached: bool = False,
    ) -> Lock:
        """
        Describe a lock; asks no node.

        Args:
            name: What to lock, or several names to lock all or none of.
            ttl: Length of the lease in seconds; None is ``OPTIONS["ttl"]``.
            wait: How long to try in seconds; 0 is one attempt, None is for ever.
            renew: Whether to extend it while it is held; None is ``OPTIONS["renew"]``.
            label: What the holder is doing, for people; never put a secret here.
            ref: What identifies the work to programs, such as a task's id.
            kind: ``manual``, ``task``, ``view``, ``model`` or ``command``, for people.
            token: Hold it with this token instead of a fresh one: 32 hexadecimal digits, unique to one holder.
            adopt: Take it over from the holder with this token, if that one still has it.
            detached: Leave it to itself: it may last longer than ``max_ttl``, is not renewed, and its end is not
                announced. For a place that another process takes over with ``adopt``, whose loss does no harm.

        Raises:
            TypeError: A name is not a string.
            ValueError: A name, ttl or wait cannot work; the message says what to write.
        """
        owner = Owner(_HOST, os.getpid(), kind, label, ref)
        chosen = self._ttl(ttl, detached)
        wanted = Wanted(check_names(name), chosen, check_wait(wait), owner, token, adopt, detached)
        return Lock(self, wanted, self.rules.renew if renew is None else renew)

    def release(self, name: str | Iterable[str], token: str) -> str:
        """
        Release a lock by its token, in any process; returns what :meth:`Lease.release` returns.

        Only the holder with this token loses the lock. It must be known to be dead, or not to renew: the next
        renewal of a living one puts back what it finds missing.
        """
        slugs = tuple(slug(name) for name in check_names(name))
        timeout = self.rules.timeout(self.rules.ttl)
        ballot = farewell(slugs, token, range(self.rules.nodes), (), 0.0, timeout, self.rules.needed)
        self.ask(ballot)
        return release_outcome(ballot, self.rules)

    def survey(self, *, slugs: tuple[str, ...] = (), offset: int = 0, count: int = 0) -> dict[int, Reply]:
        """Ask every node for the locks named, or for one page of its index; returns what came in time."""
        ballot = self._survey(slugs, offset, count)
        self.ask(ballot)
        return ballot.replies

    async def asurvey(self, *, slugs: tuple[str, ...] = (), offset: int = 0, count: int = 0) -> dict[int, Reply]:
        """Do what :meth:`survey` does without blocking."""
        ballot = self._survey(slugs, offset, count)
        await self.aask(ballot)
        return ballot.replies

    def close(self) -> None:
        """Close all idle connections; the manager can be used again and then connects anew."""
        self._gather.close()

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        gather = self._gathers.pop(asyncio.get_running_loop(), None)
        if gather:
            await gather.aclose()

    # Drivers

    def ask(self, ballot: Ballot) -> None:
        """Carry out one round, blocking."""
        self._notice_fork()
        self._gather.ask(ballot)

    async def aask(self, ballot: Ballot) -> None:
        """Carry out one round in the running event loop."""
        await self._loop_gather().ask(ballot)

    def acquisition(self, wanted: Wanted) -> Acquisition:
        """Return the steps that take a lock."""
        return Acquisition(wanted, self.rules, self._floor, fresh_nonce, random.random)

    def run(self, acquisition: Acquisition) -> Granted | GaveUp:
        """Carry out an acquisition, blocking the calling thread."""
        steps = acquisition.steps(instant())
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    self._explain(acquisition, step)
                    self._sleep(step.seconds)
                else:
                    self.ask(step)
                step = steps.send(instant())
        except StopIteration as stop:
            outcome: Granted | GaveUp = stop.value
            return outcome
        except BaseException:
            # The interrupted round's connections are gone, so this makes new ones.
            self.ask(acquisition.undo(self.rules.timeout(acquisition.wanted.ttl)))
            raise

    async def arun(self, acquisition: Acquisition) -> Granted | GaveUp:
        """Carry out an acquisition in the running event loop."""
        gather = self._loop_gather()
        steps = acquisition.steps(instant())
        try:
            step: Step = next(steps)
            while True:
                if isinstance(step, Pause):
                    self._explain(acquisition, step)
                    await self._asleep(step.seconds)
                else:
                    await gather.ask(step)
                step = steps.send(instant())
        except StopIteration as stop:
            outcome: Granted | GaveUp = stop.value
            return outcome
        except BaseException:
            gather.send(acquisition.undo())  # does not wait, so a second cancellation cannot stop it
            raise

    def held(self, wanted: Wanted, outcome: Granted | GaveUp, renew: bool) -> Lease:
        """Return the lease of a won acquisition, or raise why it was not won."""
        lease = Lease(self, self._tenure(wanted, outcome), renew, threading.Event())
        if not wanted.detached:
            watchdog.watch(lease)
        self.notify("lock_acquired", lease=lease)
        return lease

    def aheld(self, wanted: Wanted, outcome: Granted | GaveUp, renew: bool) -> Lease:
        """Return the same for the running event loop."""
        lease = AsyncLease(self, self._tenure(wanted, outcome), renew)
        if not wanted.detached:
            loop_watchdog().watch(lease)
        self.notify("lock_acquired", lease=lease)
        return lease

    def _explain(self, acquisition: Acquisition, pause: Pause) -> None:
        """Say once why somebody waits for nodes rather than for another holder."""
        if pause.silent and not acquisition.explained:
            acquisition.explained = True
            said = ", ".join(f"{self.nodes[node].name}: {reply}" for node, reply in sorted(pause.silent.items()))
            log.warning(
                "waiting for a quorum: %s",
                said,
                extra={"event": "no_quorum", "lock": ", ".join(acquisition.wanted.names)},
            )

    def _ttl(self, ttl: float | None, detached: bool) -> float:
        if ttl is None:
            return self.rules.ttl
        return max(MIN_TTL, seconds("ttl", ttl)) if detached else self.rules.check_ttl(ttl)

    def _tenure(self, wanted: Wanted, outcome: Granted | GaveUp) -> Tenure:
        if isinstance(outcome, GaveUp):
            error = self._error(wanted, outcome)
            self.notify("lock_taken", name=error.name, error=error)
            raise error
        return Tenure(wanted.names, wanted.ttl, outcome, self.rules, self._floor)

    def _error(self, wanted: Wanted, outcome: GaveUp) -> LockTakenError | QuorumUnavailableError:
        name = ", ".join(wanted.names)
        said = {node.name: str(outcome.replies.get(place, "not waited for")) for place, node in enumerate(self.nodes)}
        if not outcome.taken:
            return QuorumUnavailableError(
                name, outcome.waited, outcome.attempts, said, self.rules.needed, outcome.misconfigured
            )
        holder = decode(outcome.holder)
        return LockTakenError(
            name, outcome.waited, outcome.attempts, said, outcome.retry_after, asdict(holder) if holder else None
        )

    def _survey(self, slugs: tuple[str, ...], offset: int, count: int) -> Ballot:
        requests = dict.fromkeys(range(len(self.nodes)), Survey(slugs, offset, count))
        return Ballot(requests, lambda replies: False, self.rules.timeout(self.rules.ttl), self.rules.needed)

    def _loop_gather(self) -> AsyncGather:
        self._notice_fork()
        loop = asyncio.get_running_loop()
        if loop not in self._gathers:
            self._gathers[loop] = AsyncGather(self.nodes, self.admission, self._gather.breakers)
        return self._gathers[loop]

    def _notice_fork(self) -> None:
        """Drop what belongs to the process this one was forked from; its sockets are closed, not shut down."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._gather.close()
            self._gathers = WeakKeyDictionary()


_managers: WeakSet[LockManager] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Close the idle connections of this process; locks still held are left to end by themselves."""
    for manager in list(_managers):
        manager.close()


def check_wait(wait: float | None) -> float | None:
    """
    Return *wait* if it is None or a number of seconds from 0.

    Raises:
        ValueError: It is something else.
    """
    if wait is not None and number("wait", wait) < 0:
        raise ValueError(f"wait must be None (for ever) or at least 0 seconds, not {wait!r}.")
    return wait
