"""
A process in virtual time, with the locks of production.

Only what waits or starts a thread is replaced: the poll of a connection set, the threads that connect, listen, renew
and redeliver, and the event loop. A process uses its locks either from threads, or from the tasks of an event loop.
"""

import asyncio
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from functools import partial
from typing import Any

from django_redlock.core.acquisition import Waiter
from django_redlock.core.protocol import Failure, Reply, Request, failed
from django_redlock.core.round import Round
from django_redlock.core.rules import Rules
from django_redlock.engine.connections import (
    CONNECT_TIMEOUT,
    Connection,
    ConnectionSet,
    IdleConnections,
    NodeConnector,
)
from django_redlock.engine.driver import LoopSide
from django_redlock.engine.manager import LockManager, _managers
from django_redlock.engine.notifications import RETRY, Waiters
from django_redlock.engine.presence import Presence
from django_redlock.engine.redelivery import Redelivery
from django_redlock.engine.watchdog import Agenda, AsyncWatchdog, Runtime, Tended, carry_out, work_in
from django_redlock.nodes.base import INCOMPLETE, LinkError

from .network import Faults, Link, LoopLink
from .world import FOR_EVER, Computer, Thread, World

LEAST = 0.001  # seconds that a poll waits, if it waits
LONGEST = 60.0  # seconds after which a watchdog without work looks again

Begin = Callable[[Callable[[Any], None]], None]
"""Sends a request, with a function for the reply."""


class Process(Computer):
    """One process with a lock manager of production."""

    manager_class: type[LockManager] = LockManager

    def __init__(
        self, world: World, name: str, machines: Sequence[Any], rules: Rules, faults: Faults, *, looping: bool = False
    ) -> None:
        super().__init__(world, name)
        self.machines, self.rules, self.faults = machines, rules, faults
        self.loop = Loop(self) if looping else None
        self._loop_dog = LoopDog(self.clock)
        runtime = Runtime(
            self.clock,
            self.wall,
            world.random.random,
            sleep=lambda seconds: self.thread.sleep(seconds),
            watchdog=VirtualDog(self),
            loop_watchdog=lambda: self._loop_dog,
        )
        routes: list[Any] = [Route(self, machine) for machine in machines]
        self.manager = self.manager_class(routes, rules, runtime=runtime)
        _managers.discard(self.manager)  # which are closed when Python ends
        driver, gather = self.manager.driver, self.manager.driver.gather
        gather.idle = VirtualIdle(self)
        gather._connector = VirtualConnector(self, routes, gather.breakers)
        gather.ask = partial(self._ask, gather.ask)  # type: ignore[method-assign]
        driver.redelivery = VirtualRedelivery(self, routes)
        driver.notifications = VirtualNotifications(self, routes)  # type: ignore[assignment]
        driver.loops._make = self._new_loop_side

    @property
    def thread(self) -> Thread:
        """The thread whose turn it is."""
        thread = self.world.thread
        assert thread is not None
        return thread

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Have a task of the event loop do something, and wait for its end; cancelled with this thread."""
        assert self.loop
        thread, task = self.thread, self.loop.create_task(work)
        task.add_done_callback(lambda task: thread.wake())
        try:
            while not task.done():
                thread.wait()
        except BaseException:
            if task.cancel():
                raise
        return task.result()

    async def acall(self, begin: Begin) -> Any:
        """Send a request to a server, and return the reply."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        begin(lambda answer: self.after(0.0, self.in_loop, lambda: reply.done() or reply.set_result(answer)))
        return await reply

    def in_loop(self, call: Callable[[], object]) -> None:
        """Call a function in the event loop."""
        assert self.loop
        self.loop.enter(call)

    def close(self) -> None:
        super().close()
        if self.loop:
            self.loop.close()

    # What a schedule may look at, or disturb

    def links(self) -> list[Any]:
        """Return its idle connections to nodes."""
        driver = self.manager.driver
        sets = (*driver.gather.idle.sets, *driver.gather.idle._kept.values())
        sides = driver.loops._things.values()
        lines: list[Any] = [line for side in sides for line in side.gather._lines.values()]
        found: list[Any] = [one.link for connections in sets for one in connections.by_node.values()]
        return found + [line.link.link for line in lines]

    def begins(self, round: Round) -> None:
        """A round is about to be sent."""

    def transmits(self) -> None:
        """A request is about to be sent to one node."""

    def breathe(self) -> bool:
        """Stop here, in the middle of things, where chance says so."""
        if self.faults.on and (chance := self.faults.hazards.stall) and self.random() < chance:
            self.stop(self.world.random.choice((0.02, 0.1, 0.5, 1.0, 3.0)) * self.random())
        return True

    def _ask(self, ask: Callable[[Round, float], Any], round: Round, timeout: float = 0.0) -> Any:
        self.breathe()
        self.thread.sleep(0.0)
        self.begins(round)
        result = ask(round, timeout)
        self.breathe()
        self.thread.sleep(0.0)
        return result

    async def _aask(self, ask: Callable[[Round], Coroutine[Any, Any, None]], round: Round) -> None:
        self.breathe()
        await asyncio.sleep(0)
        self.begins(round)
        await ask(round)
        self.breathe()
        await asyncio.sleep(0)

    def _send(self, send: Callable[..., Any], round: Round, *args: Any) -> Any:
        self.begins(round)
        return send(round, *args)

    def _new_loop_side(self) -> LoopSide:
        side = self.manager.driver.new_loop_side()
        side.notifications.waiters.process = self.name  # which has random bits otherwise
        gather = side.gather
        gather.ask = partial(self._aask, gather.ask)  # type: ignore[method-assign]
        gather.send = partial(self._send, gather.send)  # type: ignore[method-assign]
        gather.leave = partial(self._send, gather.leave)  # type: ignore[method-assign]
        return side


class Route:
    """A node of production, as one process reaches it."""

    instant = fails_over = False
    calls = True

    def __init__(self, process: Process, machine: Any) -> None:
        self.name = self.address = machine.name
        self._process = process
        self._machine = machine

    def connect(self, timeout: float) -> Link:
        return self._linked(self._process.thread.call(self._connecting(timeout)))

    async def aconnect(self, timeout: float) -> LoopLink:
        return LoopLink(self._linked(await self._process.acall(self._connecting(timeout))))

    def listen(self, name: str, timeout: float, on_notification: Callable[[str], object]) -> "Listening":
        listening = Listening(self._process, self._machine, name, on_notification)
        if not self._process.thread.call(listening.begin):
            raise LinkError(Failure.REFUSED)
        return listening

    async def alisten(self, name: str, timeout: float, on_notification: Callable[[str], object]) -> "Listening":
        listening = Listening(self._process, self._machine, name, on_notification)
        if not await self._process.acall(listening.begin):
            raise LinkError(Failure.REFUSED)
        return listening

    def _connecting(self, timeout: float) -> Begin:
        process, machine, faults = self._process, self._machine, self._process.faults

        def begin(resume: Callable[[Any], None]) -> None:
            def greet() -> None:
                answer: Any = Failure.REFUSED
                if machine.up and not machine.is_replica:
                    answer = machine.link(process)
                    answer.greeting = machine.greeting()
                if not (machine.deaf or machine.mute):
                    process.arrive(faults.passes(process, machine), resume, answer)

            machine.at(faults.passes(process, machine), greet)
            process.after(timeout, resume, Failure.TIMEOUT)

        return begin

    @staticmethod
    def _linked(answer: Link | Failure) -> Link:
        if isinstance(answer, Failure):
            raise LinkError(answer)
        return answer


class Listening:
    """A connection on which a node notifies the waiters of a process."""

    def __init__(self, process: Process, machine: Any, name: str, on_notification: Callable[[str], object]) -> None:
        self.on_end: Callable[[], object] = bool
        self._process = process
        self._machine = machine
        self._name = name
        self._on_notification = on_notification

    def begin(self, resume: Callable[[Any], None]) -> None:
        process, machine, faults = self._process, self._machine, self._process.faults

        def subscribe() -> None:
            if machine.up:
                machine.listen(self._name, self._notify)
                machine.at_end.append(lambda: process.after(LEAST, lambda: self.on_end()))
            process.arrive(faults.passes(process, machine), resume, machine.up)

        machine.at(faults.passes(process, machine), subscribe)

    async def read(self) -> list[str]:
        """Wait for the end: notifications come by themselves."""
        process = self._process
        await process.acall(lambda resume: setattr(self, "on_end", partial(resume, None)))
        raise LinkError(Failure.CLOSED)

    def close(self) -> None:
        self._machine.ignore(self._name)

    def _notify(self, waiter: str) -> None:
        process, machine = self._process, self._machine
        if not process.faults.loses_notification():
            process.world.log(machine.name, "calls", waiter)
            process.arrive(process.faults.passes(process, machine), self._on_notification, waiter)


class Bell:
    """What one thread waits for."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._thread: Thread | None = None
        self._rung = False

    def ring(self, *about: object) -> None:
        self._rung = True
        if self._thread:
            self._thread.wake()

    set = ring

    def clear(self) -> None:
        self._rung = False

    def is_set(self) -> bool:
        return self._rung

    def wait(self, seconds: float = FOR_EVER) -> bool:
        """Wait until it rings, for at most some seconds; return whether it rang."""
        if not self._rung:
            self._thread = self._process.thread
            try:
                self._thread.wait(seconds)
            finally:
                self._thread = None
        rung, self._rung = self._rung, False
        return rung


class VirtualConnections(ConnectionSet):
    """A connection set whose poll takes virtual time."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._bell = Bell(process)

    def connection(self, connection: Connection) -> None:
        self.by_node[connection.node] = connection
        connection.link.on_news = self._bell.ring  # type: ignore[attr-defined]

    def drop(self, connection: Connection) -> None:
        del self.by_node[connection.node]

    def read(self, seconds: float) -> list[tuple[Connection, LinkError | None]]:
        if not (self._readable() or self.arrived):
            self._bell.clear()
            self._bell.wait(max(LEAST, seconds))
        return [(connection, connection.read()) for connection in self._readable()]

    def expect(self, node: int) -> None:
        self.connecting.add(node)

    def deliver(self, *arrival: Any) -> None:
        super().deliver(*arrival)
        self._bell.ring()

    def _readable(self) -> list[Connection]:
        return [connection for connection in self.by_node.values() if connection.link.readable()]


class VirtualIdle(IdleConnections):
    """Gives the threads of a process such connection sets."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def take(self, now: float) -> ConnectionSet:
        connections = super().take(now)
        return connections if isinstance(connections, VirtualConnections) else VirtualConnections(self._process)


class VirtualConnector(NodeConnector):
    """Connects in threads of a simulated process."""

    def __init__(self, process: Process, nodes: Sequence[Any], breakers: Any) -> None:
        super().__init__(nodes, breakers, process.clock)
        self._process = process

    def _connect(self, connections: ConnectionSet, node: int, timeout: float, until: float) -> None:
        connections.expect(node)
        self._process.spawn(self._connect_now, connections, node, timeout, until)


class VirtualThread:
    """A background thread that exists while it has something to do."""

    def __init__(self, process: Process, work: Callable[[], object], busy: Callable[[], object]) -> None:
        self.running = False
        self._process = process
        self._work = work
        self._busy = busy

    def start(self) -> str:
        if not self.running:
            self.running = True
            self._process.spawn(self._run)
        return ""

    def _run(self) -> None:
        while self._busy():
            self._work()
        self.running = False

    def join(self, seconds: float) -> None: ...


class VirtualRedelivery(Redelivery):
    """Redelivers releases in a thread of a simulated process."""

    def __init__(self, process: Process, nodes: Sequence[Any]) -> None:
        super().__init__(nodes, process.clock)
        self._process = process
        self._bell = Bell(process)  # type: ignore[assignment]
        self._thread = VirtualThread(process, self._run, self._busy)  # type: ignore[assignment]

    def _await(self, link: Any, request: Request) -> Reply:
        bell, until = Bell(self._process), self._clock() + CONNECT_TIMEOUT
        link.on_news = bell.ring
        while (reply := link.receive(request)) is INCOMPLETE:
            if (left := until - self._clock()) <= 0:
                raise LinkError(Failure.TIMEOUT)
            bell.wait(left)
        return reply or failed(Failure.NOSCRIPT)


class VirtualNotifications:
    """Notifies the waiting threads of a simulated process; a thread of its own listens to each node."""

    def __init__(self, process: Process, nodes: Sequence[Any]) -> None:
        self.waiters: Waiters[Any] = Waiters(process.rules.needed, partial(Bell, process))
        self.waiters.process = process.name
        self._process = process
        self._nodes = nodes
        self._listens = False

    def wait(self, waiter: Waiter, seconds: float, notified: float) -> None:
        bell = self.waiters.join(waiter)
        if not self._listens:
            self._listens = True
            for number in range(len(self._nodes)):
                self._process.spawn(self._listen, number)
        bell.wait(notified if self.waiters.notifies(waiter) else seconds)

    def _listen(self, number: int) -> None:
        process = self._process
        while True:
            try:
                link = self._nodes[number].listen(
                    self.waiters.process, CONNECT_TIMEOUT, partial(self.waiters.notification, number)
                )
            except LinkError:
                pass
            else:
                self.waiters.reached(number)
                bell = Bell(process)
                link.on_end = bell.ring
                bell.wait()
                self.waiters.listening.discard(number)
            process.thread.sleep(RETRY)

    def close(self) -> None: ...


class VirtualDog:
    """The watchdog of the threads. It gives no signs of life, which are for operators."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._agenda = Agenda()
        self._bell = Bell(process)
        self._runs = False

    def watch(self, tended: Tended) -> None:
        if isinstance(tended, Presence):
            return
        self._agenda.add(tended)
        self._bell.ring()
        if not self._runs:
            self._runs = True
            self._process.spawn(self._look_after)

    def forget(self, tended: Tended) -> None:
        self._agenda.drop(tended)

    def tends(self, keeper: object) -> bool:
        return False

    def apart(self, function: Callable[[], object]) -> bool:
        return False

    def rest(self) -> None: ...

    def _look_after(self) -> None:
        process = self._process
        while True:
            due = self._agenda.take(process.clock())
            for who, some in work_in(due).items():
                carry_out(who, some)
            for each in due:
                self._agenda.put_back(each)
            self._bell.wait(LEAST if due else min(LONGEST, self._agenda.next() - process.clock()))


class LoopDog(AsyncWatchdog):
    """The watchdog of an event loop, without signs of life."""

    def watch(self, tended: Tended) -> None:
        if not isinstance(tended, Presence):
            super().watch(tended)


class Loop(asyncio.AbstractEventLoop):
    """An event loop in virtual time."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._ready: deque[asyncio.Handle] = deque()
        self._turn = False  # whether a turn is to come
        self._closed = False

    def time(self) -> float:
        return self._process.clock()

    def enter(self, call: Callable[..., object], *args: Any) -> None:
        """Call a function as the event loop does."""
        _set_running_loop(self)
        try:
            call(*args)
        finally:
            _set_running_loop(None)

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if not (self._turn or self._closed):
            self._turn = True
            self._process.after(self._process.lag(), self.enter, self._run)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle, process = asyncio.TimerHandle(when, callback, args, self, context), self._process
        process.after(max(0.0, when - self.time()) / process.steady.rate + process.lag(), self._alarm, handle)
        return handle

    def _alarm(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            self.enter(handle._run)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None: ...

    def _run(self) -> None:
        self._turn = False
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if (error := context.get("exception")) and not self._closed:
            raise error

    def close(self) -> None:
        """End all tasks."""
        self._closed = True
        for task in asyncio.all_tasks(self):
            task.cancel()
        while self._ready:
            self.enter(self._run)
