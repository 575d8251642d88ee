"""
Interrupt the lock wherever the interpreter could, and check that it still works: ``python -m tests.interrupts``.

A signal handler that raises, a soft time limit or ``PyThreadState_SetAsyncExc`` ends Python code between two bytecodes.
The interpreter checks for such events at the start of a function, after a call, and when a loop begins again. The sweep
raises an exception at the first of these points, then at the second, and so on, until the code finishes without
reaching the point. With ``--lines`` it also raises before every line, except where no signal handler can run: before
``__exit__`` is called at the end of a ``with`` block.

After every interruption, three things must hold. The lock is free for others or ends with its lease. The interrupted
thread can enter it again. A lease that another thread takes is renewed and released.
"""

import argparse
import asyncio
import dis
import faulthandler
import gc
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

PACKAGE = "/django_redlock/"
TTL = 2.0  # seconds
LATEST = 20.0  # seconds after which something counts as hanging

CHECKED = {code for name, code in dis.opmap.items() if name.startswith(("CALL", "JUMP_BACKWARD", "RESUME"))} - {
    dis.opmap.get("CALL_INTRINSIC_1"),
    dis.opmap.get("CALL_INTRINSIC_2"),
    dis.opmap.get("JUMP_BACKWARD_NO_INTERRUPT"),
}
"""Instructions after which the interpreter runs signal handlers."""

NONES = [dis.opmap["LOAD_CONST"]] * 3


class Interrupted(BaseException):
    """Raised by the signal handler."""


class Trap:
    """
    Raises :class:`Interrupted` at one point of the code that runs in this thread; counts the points.

    Args:
        at: The point at which to raise.
        lines: Whether lines are points, too.
    """

    def __init__(self, at: int, lines: bool = False) -> None:
        self.at = at
        self.passed = 0
        self.where = ""
        self._lines = lines
        self._last: dict[int, int] = {}

    @property
    def sprung(self) -> bool:
        return self.passed > self.at

    @contextmanager
    def set(self) -> Iterator[None]:
        """Raise in a call of this thread in the block, and swallow the exception at the end."""
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            with suppress(Interrupted):
                yield
        finally:
            sys.settrace(before)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        inside = PACKAGE in frame.f_code.co_filename or (frame.f_back is not None and frame.f_back.f_trace is not None)
        # Interrupted in its own code, Python's logging leaves the lock of a handler held, and asyncio leaves a task
        # that waits for ever for a finished future.
        file = frame.f_code.co_filename
        spared = file.endswith(("tests/interrupts.py", "logging/__init__.py")) or "/asyncio/" in file
        if not inside or spared or self.sprung:
            return None
        frame.f_trace_opcodes = True
        self._last.pop(id(frame), None)
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            operation = frame.f_code.co_code[frame.f_lasti]
            last, self._last[id(frame)] = self._last.get(id(frame)), operation
            # The interpreter checks at the end of the call itself, which is still inside a block that is left next.
            if (last is None or last in CHECKED) and not leaves_block(frame.f_code, frame.f_lasti):
                self._pass(frame)
        elif event == "line" and self._lines and not leaves_block(frame.f_code, frame.f_lasti):
            self._pass(frame)
        elif event == "return":
            self._last.pop(id(frame), None)
        return None if self.sprung else self._on_event

    def _pass(self, frame: FrameType) -> None:
        self.passed += 1
        if self.sprung:
            self.where = f"{frame.f_code.co_filename.rpartition(PACKAGE)[2]}:{frame.f_lineno} ({frame.f_code.co_name})"
            sys.settrace(None)
            raise Interrupted


def leaves_block(code: CodeType, at: int) -> bool:
    """Return whether at this instruction a ``with`` block begins to be left: its ``__exit__`` is called next."""
    operations = [code.co_code[place] for place in range(at, min(at + 24, len(code.co_code)), 2)]
    operations = [operation for operation in operations if dis.opname[operation] not in ("NOP", "CACHE", "SWAP")]
    return operations[:3] == NONES and dis.opname[[*operations, 0][3]] in ("CALL", "PRECALL")


class Scenario(NamedTuple):
    """
    The code to interrupt.

    Args:
        name: Its name.
        run: Runs it; gets the manager and the lock.
        prepare: Runs before it, and is not interrupted.
    """

    name: str
    run: Callable[[Any, Any, Any], None]
    prepare: Callable[[Any, Any], Any] = lambda manager, lock: None


def enter(manager: Any, lock: Any, prepared: Any) -> None:
    with lock:
        pass


def by_hand(manager: Any, lock: Any, prepared: Any) -> None:
    lease = lock.acquire()
    lease.extend()
    lease.release()


def extend(manager: Any, lock: Any, lease: Any) -> None:
    lease.extend()


def release(manager: Any, lock: Any, lease: Any) -> None:
    lease.release()


def send(manager: Any, lock: Any, lease: Any) -> None:
    lease.release(wait=False)


def wait(manager: Any, lock: Any, prepared: Any) -> None:
    with lock:
        pass


def taken(manager: Any, lock: Any) -> Any:
    """Let another owner hold the lock for a moment, so that the scenario waits for it."""
    lease = manager.lock(lock.name, wait=10 * TTL, ttl=TTL, renew=False).acquire()
    threading.Timer(0.1, lease.release).start()
    return lease


def lose(manager: Any, lock: Any, lease: Any) -> None:
    from django_redlock import LockLostError

    lease.on_lost(lambda lease: None)
    lease.lost.is_set()
    lease.hold.deadline = 0.0
    with suppress(LockLostError):
        lease.ensure()


class WatchdogTurn:
    """
    A lease that a watchdog of its own extends, in a thread of the sweep's: no signal interrupts the real one's thread.

    Args:
        lease: The lease, which is due.
    """

    def __init__(self, lease: Any) -> None:
        from django_redlock.engine.renewal import Watchdog
        from django_redlock.nodes.clock import steady

        self._ahead = 0.0  # seconds by which its clock is ahead, so that the lease is due again
        self._lease = lease
        self._dog = Watchdog(lambda: steady() + self._ahead)
        self._bell, self._dog._bell = self._dog._bell, self  # type: ignore[assignment]
        self._over = False
        lease.hold._renew_at = 0.0
        self._dog._inbox.append((weakref.ref(lease), True))

    def run(self) -> None:
        """Run until the thread would sleep, then until it ends."""
        self._dog._run()

    def ring(self) -> None:
        """Wake nobody; this takes the place of the watchdog's bell."""

    def wait(self, seconds: float) -> bool:
        """Have the thread end instead of sleeping: nothing is left to look after."""
        self._over = True
        self._dog.forget(self._lease)
        self._dog.rest()
        return True

    def release(self) -> None:
        """Check that the watchdog still extends the lease, in its own thread; then release the lease."""
        done, self._dog._bell = self._lease.extensions, self._bell
        self._lease.hold._renew_at, self._ahead = 0.0, 5.0
        if self._over:
            self._dog.watch(self._lease)
        else:
            self._dog._thread.start()  # as Background does after an exception
        eventually(lambda: self._lease.extensions > done)
        self._dog.forget(self._lease)
        self._dog.rest()
        self._lease.release()


def renew(manager: Any, lock: Any, turn: WatchdogTurn) -> None:
    turn.run()


def other_ways(manager: Any, lock: Any, prepared: Any) -> None:
    """Take the lock by a lease's own block, twice, by a decorated function, together with another name, as a permit."""
    lease = lock.try_acquire()
    if lease:
        with lease:
            pass
    again = variant(lock, reentrant=True)
    with again, again:
        pass
    lock(lambda: None)()
    with manager.lock([lock.name, "swept as well"], ttl=TTL, wait=10 * TTL):
        pass
    variant(lock, shared=True).acquire().release(wait=False)
    with manager.lock("swept permits", ttl=TTL, wait=10 * TTL, limit=2):
        pass


def give_up(manager: Any, lock: Any, other: Any) -> None:
    from django_redlock import LockTakenError

    with suppress(LockTakenError):
        manager.lock(lock.name, wait=0.02).acquire()


def variant(lock: Any, **options: Any) -> Any:
    """Return another lock of the same name."""
    return lock.description().manager.lock(lock.name, ttl=TTL, wait=10 * TTL, **options)


async def aother_ways(lock: Any) -> None:
    """Do what :func:`other_ways` does in an event loop."""
    lease = await lock.atry_acquire()
    if lease:
        async with lease:
            pass
    again = variant(lock, reentrant=True)
    async with again, again:
        pass

    @lock
    async def work() -> None: ...

    await work()
    await (await variant(lock, shared=True).aacquire()).arelease(wait=False)


async def agive_up(lock: Any) -> None:
    from django_redlock import LockTakenError

    with suppress(LockTakenError):
        await lock.description().manager.lock(lock.name, wait=0.02).aacquire()


async def aenter(lock: Any) -> None:
    async with lock:
        pass


async def asend(lock: Any) -> None:
    lease = await lock.aacquire()
    await lease.arelease(wait=False)


async def aby_hand(lock: Any) -> None:
    lease = await lock.aacquire()
    await lease.aextend()
    await lease.arelease()


async def arenew(lock: Any) -> None:
    """Wait until the watchdog of the event loop has extended a lease; an interruption there ends a callback of it."""
    from django_redlock.engine import renewal

    lease = await lock.aacquire()
    lease.hold._renew_at = 0.0
    with patch.object(renewal, "TICK", 0.02):  # otherwise each interruption costs a second
        renewal.loop_watchdog().watch(lease)
        async with asyncio.timeout(LATEST):
            while not lease.extensions:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    await lease.arelease()


def acquired(manager: Any, lock: Any) -> Any:
    return lock.acquire()


def held(manager: Any, lock: Any) -> Any:
    """Let another owner hold the lock."""
    return manager.lock(lock.name, wait=10 * TTL, renew=False).acquire()


BLOCKING = [
    Scenario("enter", enter),
    Scenario("by hand", by_hand),
    Scenario("extend", extend, acquired),
    Scenario("release", release, acquired),
    Scenario("release, sent", send, acquired),
    Scenario("lose", lose, acquired),
    Scenario("renew", renew, lambda manager, lock: WatchdogTurn(lock.acquire())),
    Scenario("wait", wait, taken),
    Scenario("other ways", other_ways),
    Scenario("give up", give_up, held),
]


class Sweep:
    """
    Interrupts one scenario everywhere.

    Args:
        manager: The manager of the locks; its ``notify`` is replaced.
        scenario: The code to interrupt.
        elsewhere: Whether to use a thread other than the main one.
        lines: Whether to interrupt before every line, too.
    """

    def __init__(self, manager: Any, scenario: Scenario, *, elsewhere: bool = False, lines: bool = False) -> None:
        self.manager = manager
        self.scenario = scenario
        self.lines = lines
        self.points = 0
        self.slow: list[str] = []  # the points at which the key was left until its lease ended
        self._lock = manager.lock("swept", wait=10 * TTL, ttl=TTL)
        self._others = ThreadPoolExecutor(1, "others")
        self._own = ThreadPoolExecutor(1, "own") if elsewhere else None
        self._extended = threading.Event()
        manager.notify = self._notify

    def _notify(self, event: str, **about: Any) -> None:
        if event == "lock_extended":
            self._extended.set()

    def run(self, first: int = 0, step: int = 1, most: int | None = None) -> int:
        """Interrupt at every point, or at some; return how many there were."""
        gc.collect()
        gc.freeze()  # so that collecting the garbage of the sweep takes no time
        for at in count(first, step):
            if most is not None and self.points >= most:
                return self.points
            faulthandler.dump_traceback_later(2 * LATEST, exit=True)  # shows the code that hangs
            trap = self._here(self._interrupt, at)
            faulthandler.cancel_dump_traceback_later()
            if not trap.sprung:
                return self.points
            self.points += 1
            self._check(trap)
        raise AssertionError

    def count(self, trap: Trap) -> None:
        """Let *trap*, which never triggers, count the points."""
        self._here(self._run_until, Trap(trap.at))  # with connections still to be made
        self._here(self._run_until, trap)

    def _run(self, prepared: Any) -> None:
        self.scenario.run(self.manager, self._lock, prepared)

    def close(self) -> None:
        """Wait for the threads."""
        self._others.shutdown()
        if self._own:
            self._own.shutdown()

    def _here(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._own.submit(function, *arguments).result(LATEST) if self._own else function(*arguments)

    def _interrupt(self, at: int) -> Trap:
        trap = Trap(at, self.lines)
        self._run_until(trap)
        return trap

    def _run_until(self, trap: Trap) -> None:
        prepared = self.scenario.prepare(self.manager, self._lock)
        with trap.set():
            self._run(prepared)
        if prepared:  # as a caller with a lease does
            prepared.release()

    def _check(self, trap: Trap) -> None:
        gc.collect()  # tracing makes reference cycles of frames, which would keep their leases alive
        began = time.monotonic()
        try:
            self._others.submit(self._take_and_renew).result(LATEST)
            if time.monotonic() - began > TTL / 3:
                self.slow.append(trap.where)
            self._here(self._enter)
        except BaseException as error:
            raise AssertionError(f"{self.scenario.name}: after an interruption at {trap.where}: {error!r}") from error

    def _take_and_renew(self) -> None:
        from django_redlock.engine.renewal import watchdog

        lease = self.manager.lock("swept", wait=10 * TTL).acquire()
        self._extended.clear()
        lease.hold._renew_at = 0.0
        watchdog.watch(lease)
        assert self._extended.wait(LATEST / 2), "not renewed"
        assert lease.release() == "released"

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
        self._loop.run_until_complete(self.scenario.run(self._lock))  # type: ignore[call-arg,func-returns-value]

    def _enter(self) -> None:
        async def enter_and_renew() -> None:
            async with asyncio.timeout(LATEST):
                async with self._lock as lease:
                    assert lease.valid()
                    count = lease.extensions
                    lease.hold._renew_at = 0.0
                    from django_redlock.engine.renewal import loop_watchdog

                    loop_watchdog().watch(lease)
                    while lease.extensions == count:  # noqa: ASYNC110
                        await asyncio.sleep(0.001)

        self._loop.run_until_complete(enter_and_renew())


ASYNC = [
    Scenario("async enter", aenter),  # type: ignore[arg-type]
    Scenario("async by hand", aby_hand),  # type: ignore[arg-type]
    Scenario("async release, sent", asend),  # type: ignore[arg-type]
    Scenario("async renew", arenew),  # type: ignore[arg-type]
    Scenario("async wait", aenter, taken),  # type: ignore[arg-type]
    Scenario("async other ways", aother_ways),  # type: ignore[arg-type]
    Scenario("async give up", agive_up, held),  # type: ignore[arg-type]
]


KINDS = ("memory", "servers", "one down", "one breaking")


def make_manager(kind: str, urls: list[str]) -> Any:
    """
    Return a manager over three nodes: in memory, those at *urls*, or two in memory and one that fails.

    "one down" cannot be reached; a connection to "one breaking" breaks after each request, before its reply is read.
    """
    from django_redlock.core.rules import Rules
    from django_redlock.engine.manager import LockManager
    from django_redlock.nodes import NodeSpec, open_node
    from django_redlock.nodes.memory import MemoryNode

    class BreakingNode(MemoryNode):
        def connect(self, timeout: float) -> Any:
            self.down = False
            return super().connect(timeout)

        def execute(self, request: Any) -> Any:
            reply = super().execute(request)
            self.down = True
            return reply

    nodes: list[Any] = [open_node(NodeSpec(url), "i:") for url in urls]
    if kind == "one down":
        nodes = [open_node(NodeSpec("redis://127.0.0.1:1"), "i:")]
    if kind == "one breaking":
        nodes = [BreakingNode("breaking")]
    if kind != "servers":
        nodes += [MemoryNode(f"i{place}") for place in range(len(nodes), 3)]
    return LockManager(nodes, Rules(len(nodes), ttl=2 * TTL, node_timeout=0.4, restart_guard=False, min_validity=0.05))


def sweeps(kind: str, urls: list[str], lines: bool) -> Iterator[Sweep]:
    """Yield all sweeps over one kind of node."""
    for elsewhere in (False, True):
        for scenario in BLOCKING:
            yield Sweep(make_manager(kind, urls), scenario, elsewhere=elsewhere, lines=lines)
        for scenario in ASYNC:
            yield AsyncSweep(make_manager(kind, urls), scenario, elsewhere=elsewhere, lines=lines)


class Storm:
    """
    Signals at random moments, while another thread takes locks and a third lease must be renewed.

    Args:
        manager: The manager of the locks.
        seed: The seed of the moments.
    """

    def __init__(self, manager: Any, seed: int = 1) -> None:
        self.hits = self.taken = 0
        self._manager = manager
        self._lock = manager.lock("swept", wait=10 * TTL, ttl=TTL)
        self._random = random.Random(seed)

    def run(self, hits: int) -> None:
        """
        Interrupt with the given number of signals; fail if anything hangs, or is not renewed or released, afterwards.
        """
        faulthandler.dump_traceback_later(4 * LATEST, exit=True)
        kept = self._manager.lock("kept", ttl=10.0).acquire()
        threading.Thread(target=self._take_others, daemon=True).start()
        before = signal.signal(signal.SIGALRM, self._hit)
        while self.hits < hits:
            with suppress(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, self._random.uniform(0.00002, 0.003))
                while True:
                    with self._lock as lease:
                        lease.extend()
        signal.signal(signal.SIGALRM, before)
        taken, extensions = self.taken, kept.extensions
        with self._lock as lease:
            assert lease.valid()
        eventually(lambda: self.taken > taken + 3)
        eventually(lambda: kept.extensions > extensions)
        assert kept.release() == "released"
        print("survived", self.hits)
        faulthandler.cancel_dump_traceback_later()

    def _hit(self, number: int, frame: FrameType | None) -> None:
        self.hits += 1
        raise Interrupted

    def _take_others(self) -> None:
        while True:
            self._manager.lock("other", wait=10 * TTL).acquire().release()
            self.taken += 1


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LATEST
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def main() -> None:
    """Sweep everything; exit with 1 at the first failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.interrupts", description=main.__doc__)
    parser.add_argument("--lines", action="store_true", help="interrupt before every line, too")
    parser.add_argument("--step", type=int, default=1, help="interrupt only at every STEP-th point")
    parser.add_argument("--first", type=int, default=0, help="begin at this point: runs side by side share the points")
    parser.add_argument("--nodes", choices=KINDS, action="append", help="all if not given")
    parser.add_argument("--signals", type=int, metavar="COUNT", help="send COUNT signals at random, instead")
    parser.add_argument("--scenario", help="run only scenarios whose names contain this")
    chosen = parser.parse_args()
    from django.conf import settings

    if not settings.configured:
        settings.configure()
    from django_redlock.testing import start_servers

    for kind in chosen.nodes or KINDS:
        servers = start_servers(3) if kind == "servers" else None
        if chosen.signals:
            Storm(make_manager(kind, servers.urls if servers else [])).run(chosen.signals)
            continue
        for sweep in sweeps(kind, servers.urls if servers else [], chosen.lines):
            if chosen.scenario and chosen.scenario not in sweep.scenario.name:
                continue
            began = time.monotonic()
            sweep.count(Trap(1_000_000))  # Python 3.12 shows opcodes from the second time on
            sweep.run(chosen.first, chosen.step)
            where = "another thread" if sweep._own else "the main thread"
            took, slow = time.monotonic() - began, len(sweep.slow)
            print(
                f"{kind:8} {sweep.scenario.name:14} {where:16} {sweep.points:6} interruptions, {slow} left to the ttl, "
                f"{took:.0f} s",
                *sorted(set(sweep.slow)),
                sep="\n    " if chosen.step == 1 else "",
                flush=True,
            )
            sweep.close()
            gc.collect()
        if servers:
            servers.stop()


if __name__ == "__main__":
    main()
