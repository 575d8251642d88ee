"""Interrupt one scenario everywhere, and check afterwards what must hold."""

import asyncio
import faulthandler
import gc
import random
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

from django_redlock.core.rules import Rules
from django_redlock.engine.manager import LockManager
from django_redlock.engine.watchdog import loop_watchdog, watchdog
from django_redlock.nodes import NodeSpec, open_node
from django_redlock.nodes.memory import MemoryNode

from .async_scenarios import ASYNC
from .background import BACKGROUND
from .late import ASYNC_LATE, LATE
from .scenarios import FOREGROUND, LATEST, TTL, Scenario, eventually, mend
from .trap import NEVER, Line, Passage, Trap

BLOCKING = [*FOREGROUND, *LATE, *BACKGROUND]
IN_LOOPS = [*ASYNC, *ASYNC_LATE]


class Sweep:
    """
    Interrupts one scenario everywhere.

    Args:
        manager: The manager of the locks; its ``notify`` is replaced.
        scenario: The code to interrupt.
        elsewhere: Whether to use a thread other than the main one.
        lines: Whether to interrupt before every line, too.
        twice: Whether to interrupt once more while the first interruption is handled.
        delivers: Whether every node takes a release that is redelivered.
    """

    def __init__(
        self,
        manager: Any,
        scenario: Scenario,
        *,
        elsewhere: bool = False,
        lines: bool = False,
        twice: bool = False,
        delivers: bool = True,
    ) -> None:
        self.manager = manager
        self.scenario = scenario
        self.points = 0
        self.again = 0  # how often a second interruption followed
        self.slow: list[str] = []  # the points at which the key was left until its lease ended
        self.elsewhere = elsewhere
        self._lines = lines
        self._twice = twice
        self._delivers = delivers
        self._random = random.Random(1)
        self._lock = self._new_lock()
        self._left: list[tuple[str, Any]] = []  # the locks that were not free soon, each with its point
        self._others = ThreadPoolExecutor(1, "others")
        self._own = ThreadPoolExecutor(1, "own") if elsewhere else None
        self._extended = threading.Event()
        manager.notify = self._notify

    def _notify(self, event: str, **about: Any) -> None:
        if event == "lock_extended":
            self._extended.set()

    def run(self, first: int = 0, step: int = 1, most: int | None = None) -> int:
        """Interrupt at every point, or at some; return how many there were."""
        with undisturbed():
            for at in count(first, step):
                if (most is not None and self.points >= most) or not self._interrupt(at):
                    break
        self._finish()
        return self.points

    def run_lines(self, done: set[Line]) -> int:
        """Interrupt at the first and at one random later point of each line that is not *done*; return how many."""
        whole = Trap(NEVER, lines=True)
        self.count(whole)
        with undisturbed():
            for line, points in list(whole.passages.items()):  # a suspended coroutine may still be traced
                if line in done:
                    continue
                done.add(line)
                for number in {1, self._random.randint(1, points)}:
                    self._interrupt(Passage(line, number))
        self._finish()
        return self.points

    def sample(self, points: int, first: int = 0) -> int:
        """Interrupt at about the given number of points, spread over the scenario; return how many there were."""
        whole = Trap(NEVER, self._lines)
        self.count(whole)
        return self.run(first, 1 + whole.passed // points)

    def count(self, trap: Trap) -> None:
        """Let *trap*, which never triggers, count the points."""
        self._here(self._run_until, Trap(NEVER))  # with connections still to be made
        self._here(self._run_until, trap)

    def close(self) -> None:
        """Wait for the threads."""
        self._others.shutdown()
        if self._own:
            self._own.shutdown()
        self.manager.close()

    def rehearse(self, trap: Trap) -> None:
        """Run the scenario twice with *trap*, which never triggers: connections are made the first time. Then check."""
        self._here(self._run_until, trap)
        self._here(self._run_until, trap)
        self._check(trap)
        self._finish()

    def _here(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._own.submit(function, *arguments).result(LATEST) if self._own else function(*arguments)

    def _interrupt(self, at: int | Passage) -> bool:
        """Interrupt at one point and check; returns whether the code has reached it."""
        faulthandler.dump_traceback_later(2 * LATEST, exit=True)  # shows the code that hangs
        trap = Trap(at, self._lines or isinstance(at, Passage), self._random.randint(0, 40) if self._twice else None)
        self._here(self._run_until, trap)
        faulthandler.cancel_dump_traceback_later()
        if trap.sprung:
            self.points += 1
            self.again += trap.sprung_again
            self._check(trap)
        return trap.sprung

    def _run_until(self, trap: Trap) -> None:
        prepared = self.scenario.prepare(self.manager, self._lock)
        try:
            with trap.set():
                self._run(prepared)
        finally:
            mend(self.manager)
        if prepared:  # as a caller with a lease does
            prepared.release()

    def _run(self, prepared: Any) -> None:
        self.scenario.run(self.manager, self._lock, prepared)

    def _check(self, trap: Trap) -> None:
        """Check at once what can be, and leave a lock that is not free for the end of the sweep: it takes a ttl."""
        gc.collect()  # tracing makes reference cycles of frames, which would keep their leases alive
        try:
            if not self._others.submit(self._take_and_renew, TTL / 4).result(LATEST):
                self.slow.append(trap.where)
                self._left.append((trap.where, self._lock))
                self._lock = self._new_lock()
                assert self._others.submit(self._take_and_renew, LATEST).result(2 * LATEST), "a free lock is taken"
            self._here(self._enter)
            if not self._twice:  # the second exception may come just as the waiter is forgotten
                waiters = self.manager.driver.notifications.waiters
                eventually(lambda: not len(waiters))  # another thread of the scenario may still wait
        except BaseException as error:
            raise self._failed(trap.where, error) from error

    def _finish(self) -> None:
        """Check the locks that were not free, and what runs in the background."""
        for where, lock in self._left:
            self._lock = lock
            try:
                assert self._others.submit(self._take_and_renew, LATEST).result(2 * LATEST), "never free"
                self._here(self._enter)
            except BaseException as error:
                raise self._failed(where, error) from error
        self._left.clear()
        driver = self.manager.driver
        driver.redelivery.take({}, 0.0)  # as the next release does that a node misses, if no thread could be started
        eventually(self._is_over)

    def _is_over(self) -> bool:
        """Return whether nothing is left for the background."""
        driver = self.manager.driver
        if self._twice:
            driver.unattended.look()  # as the watchdog does at the next release, if it could not be told of the last
        return not len(driver.unattended) and not (self._delivers and len(driver.redelivery))

    def _failed(self, where: str, error: BaseException) -> AssertionError:
        faulthandler.dump_traceback()  # shows the thread that hangs
        return AssertionError(f"{self.scenario.name}: after an interruption at {where}: {error!r}")

    def _new_lock(self) -> Any:
        return self.manager.lock(f"swept {uuid.uuid4()}", wait=10 * TTL, ttl=TTL)

    def _take_and_renew(self, wait: float) -> bool:
        """Take the lock as another owner; returns False if it is not free in time."""
        lease = self.manager.lock(self._lock.name, wait=wait).try_acquire()
        if lease is None:
            return False
        self._extended.clear()
        lease.hold._renew_at = 0.0
        watchdog.watch(lease)
        assert self._extended.wait(LATEST / 2), "not renewed"
        assert lease.release() == "released"
        return True

    def _enter(self) -> None:
        with self._lock as lease:
            assert lease.valid()


class AsyncSweep(Sweep):
    """The same in an event loop of the thread's own."""

    def __init__(self, manager: Any, scenario: Any, **options: Any) -> None:
        super().__init__(manager, scenario, **options)
        self._loop = self._here(asyncio.new_event_loop)
        self._loop.set_exception_handler(lambda loop, context: None)

    def close(self) -> None:
        async def end() -> None:
            await self.manager.aclose()

        self._here(self._loop.run_until_complete, end())
        self._here(self._loop.close)
        super().close()

    def _run(self, prepared: Any) -> None:
        self._loop.run_until_complete(self.scenario.run(self.manager, self._lock, prepared))

    def _enter(self) -> None:
        async def enter_and_renew() -> None:
            async with asyncio.timeout(LATEST):
                async with self._lock as lease:
                    assert lease.valid()
                    count = lease.extensions
                    lease.hold._renew_at = 0.0
                    loop_watchdog().watch(lease)
                    while lease.extensions == count:  # noqa: ASYNC110
                        await asyncio.sleep(0.001)

        self._loop.run_until_complete(enter_and_renew())


@contextmanager
def undisturbed() -> Iterator[None]:
    """Collect the garbage that there is, and none of it again in the block: that would take most of the time."""
    gc.collect()
    gc.freeze()
    yield


KINDS = ("memory", "servers", "one down", "one breaking")


class BreakingNode(MemoryNode):
    """A node each of whose connections breaks after a request, before its reply is read."""

    def connect(self, timeout: float) -> Any:
        """Open a link, at once."""
        self.down = False
        return super().connect(timeout)

    def execute(self, request: Any) -> Any:
        """Carry out a request, and break."""
        reply = super().execute(request)
        self.down = True
        return reply


def make_manager(kind: str, urls: list[str]) -> LockManager:
    """
    Return a manager over three nodes: in memory, those at *urls*, or two in memory and one that fails.

    "one down" cannot be reached; a connection to "one breaking" breaks after each request, before its reply is read.
    """
    nodes: list[Any] = [open_node(NodeSpec(url), "i:") for url in urls]
    if kind == "one down":
        nodes = [open_node(NodeSpec("redis://127.0.0.1:1"), "i:")]
    if kind == "one breaking":
        nodes = [BreakingNode("breaking")]
    if kind != "servers":
        nodes += [MemoryNode(f"i{place}") for place in range(len(nodes), 3)]
    return LockManager(nodes, Rules(len(nodes), ttl=2 * TTL, node_timeout=0.4, restart_guard=False, min_validity=0.05))


def make_sweep(scenario: Scenario, kind: str = "memory", urls: Sequence[str] = (), **options: Any) -> Sweep:
    """Return a sweep of a scenario over one kind of node; the options are those of :class:`Sweep`."""
    make = AsyncSweep if scenario in IN_LOOPS else Sweep
    return make(make_manager(kind, list(urls)), scenario, delivers=kind in ("memory", "servers"), **options)


def sweeps(kind: str, urls: Sequence[str], **options: Any) -> Iterator[Sweep]:
    """Yield all sweeps over one kind of node."""
    for elsewhere in (False, True):
        for scenario in (*BLOCKING, *IN_LOOPS):
            yield make_sweep(scenario, kind, urls, elsewhere=elsewhere, **options)
