"""
Ask all nodes at once from an event loop (internal).

The rounds are those of :mod:`.rounds`. Each event loop has one link per node, shared by its tasks. Requests are written
at once, in order, and the link hands every reply to the round that asked, without a task in between. So there are no
connection sets, and a request that must follow another, such as a release, is simply written after it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar
from weakref import WeakSet

from ..core.admission import Admission, Greeting
from ..core.protocol import Failure, Kind, Reply, failed
from ..core.round import Round
from ..nodes.base import AsyncLink, LinkError, Node, Packed
from ..runtime.clock import LATE, OWED, SLICES, Clock, crowded, is_late
from .connections import MAX_IDLE, SILENCE, SILENT, Breakers, connect_timeout
from .rounds import GRACE, IDLE

LOOKS = 10  # turns of the event loop in which it reads what arrived before a timeout

log = logging.getLogger("django_redlock")


@dataclass(eq=False, slots=True)
class Line:
    """A link, the number of replies in flight on it, since when it has been silent, and how long it may be silent."""

    link: AsyncLink
    server: str
    in_flight: int = 0
    silent_since: float = 0.0
    patience: float = 0.0
    retired: bool = False

    def is_silent(self, now: float) -> bool:
        """Return whether a reply is overdue."""
        return self.in_flight > 0 and now - self.silent_since > self.patience


class AsyncGather:
    """
    Ask the nodes of one alias from the tasks of one event loop.

    Args:
        nodes: The nodes, in the order of the settings.
        admission: Which of them may vote; shared with the blocking side.
        breakers: Which nodes failed lately; shared with the blocking side.
        clock: Returns seconds on a steady clock.
    """

    def __init__(self, nodes: Sequence[Node], admission: Admission, breakers: Breakers, clock: Clock) -> None:
        self._nodes = nodes
        self._admission = admission
        self._breakers = breakers
        self._clock = clock
        self._lines: dict[int, Line] = {}
        self._retired: WeakSet[AsyncLink] = WeakSet()
        self._reviewed = -1  # see ConnectionSet.reviewed
        self._connecting: dict[int, asyncio.Task[LinkError | None]] = {}
        self._unattended: set[asyncio.Future[None]] = set()
        self._limits: TimeLimits[PendingRound] = TimeLimits(self._time_out, clock)

    async def ask(self, round: Round) -> None:
        """Carry out one round: send it, and wait until it is decided, all nodes have replied, or it has timed out."""
        start = self._clock()
        poll = PendingRound(round, start)
        try:
            self._send_all(poll)
            fresh = not self._lines  # also if all of them were found broken
            if round.timeout and round.requests and not round.closed:
                await self._wait(poll)
            for node in () if round.closed else poll.missing() & poll.stuck:
                poll.receive(node, failed(Failure.TIMEOUT, Kind.UNKNOWN))
            if (fresh or round.mending) and self._connecting:
                left = max(0.0, start + round.timeout - self._clock()) if round.mending else min(GRACE, round.timeout)
                await asyncio.wait(self._connecting.values(), timeout=left)
            if round.patience:
                await self._hear_out(poll)
        finally:
            poll.over = True
            round.close()
            for node in poll.spared:
                round.receive(node, failed(Failure.FAILED_LATELY))
            for node in self._connecting.keys() & (poll.missing() - poll.sent):
                round.receive(node, failed(Failure.NOT_CONNECTED))  # the request will not be sent there any more

    def send(self, round: Round) -> None:
        """Send a round with a timeout of 0; never blocks, so that it works during cancellation."""
        self._send_all(PendingRound(round, self._clock()))
        round.close()

    def leave(self, round: Round, timeout: float, ended: Callable[[Round], object]) -> bool:
        """
        Send a round that is *unattended*; never blocks.

        Args:
            round: The round.
            timeout: Seconds after which the nodes that have not answered count as silent.
            ended: Called with the round later, in this event loop, when its outcome is known.

        Returns:
            Whether the round is open; otherwise *ended* is not called.
        """
        poll = PendingRound(round, self._clock())
        self._send_all(poll)
        if round.closed:
            return False
        poll.settled = settled = asyncio.get_running_loop().create_future()
        self._limits.add(poll, timeout)

        def over(settled: asyncio.Future[None]) -> None:
            self._limits.discard(poll)
            self._unattended.discard(settled)
            ended(round)

        self._unattended.add(settled)
        settled.add_done_callback(over)
        return True

    async def aclose(self) -> None:
        """Drop all links, after the replies to unattended rounds have come or their time has passed."""
        if self._unattended:
            await asyncio.wait(self._unattended)
        tasks = list(self._connecting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in (*[line.link for line in self._lines.values()], *self._retired):
            link.close()
        self._lines.clear()
        self._limits.rest()
        await asyncio.sleep(0)  # let the aborted transports close their sockets

    async def _wait(self, poll: "PendingRound") -> None:
        """Wait until the round is settled, at the latest by its time limit."""
        poll.settled = asyncio.get_running_loop().create_future()
        try:
            self._limits.add(poll, poll.round.timeout)
            poll.settle()
            if poll.spared:
                await self._spare(poll, poll.settled)
            await poll.settled
        finally:
            self._limits.discard(poll)

    async def _spare(self, poll: "PendingRound", settled: asyncio.Future[None]) -> None:
        """Wait a while for the other nodes; if they do not decide the round, ask those that failed lately, too."""
        poll.settle()
        if not poll.round.needed:
            return
        await asyncio.wait([settled], timeout=poll.round.timeout / SLICES)
        if not poll.round.closed:
            poll.settled = asyncio.get_running_loop().create_future()
            spared, poll.spared, now = poll.spared, set(), self._clock()
            for node in spared:
                if line := self._usable(node, poll.round, now):  # another round has connected meanwhile
                    self._send(node, line, poll, now)
                else:
                    self._connect(node, poll)

    async def _hear_out(self, poll: "PendingRound") -> None:
        """Wait for the other replies to a refused round, for as long as its patience lasts."""
        loop = asyncio.get_running_loop()
        until = loop.time() + poll.round.patience
        while poll.round.unheard and (left := until - loop.time()) > 0:
            poll.settled = loop.create_future()
            await asyncio.wait([poll.settled], timeout=left)

    def _time_out(self, poll: "PendingRound", late: bool) -> bool:
        """
        Note the nodes that did not answer in time, and settle the round; return False to wait on.

        If this event loop itself was *late*, that says nothing about the nodes. Neither does the silence of a link that
        had *rested*, and may have been cut; the node gets a new link.
        """
        now, missing = self._clock(), poll.missing() - poll.spared
        if now - poll.began < poll.round.lifetime:
            if missing and missing <= self._connecting.keys():  # none of them has been asked yet
                most = self._breakers.allowance(poll.round.timeout, missing, cleanup=poll.round.cleanup)
                left = poll.began + most - now
                if left > 0:
                    self._limits.add(poll, left)
                if left > 0 or late:
                    return False
            if poll.looks < LOOKS and any(
                node in self._lines and self._lines[node].link.readable() for node in missing
            ):
                poll.looks += 1
                return False  # the event loop delivers what has arrived
        failure = Failure.LATE if late else Failure.TIMEOUT
        for node in missing:
            sent = node in poll.sent
            if sent and poll.round.rested and node in self._lines:
                self._retire(node)
            elif not late:
                self._breakers[node].failed(now, failure.value, silent=True)
            poll.receive(node, failed(failure, Kind.UNKNOWN if sent else Kind.FAILED))
        poll.round.close()
        poll.settle()
        return True

    def _send_all(self, poll: "PendingRound") -> None:
        round, now = poll.round, self._clock()
        round.begin(self._admission)
        if now > self._admission.next_due or self._reviewed != self._admission.changes:  # for few rounds
            self._review(now)
        resting = set() if round.cleanup else self._breakers.resting(round, now)
        for node in round.requests:
            line = self._usable(node, round, now)
            if line:
                if round.cleanup and round.timeout and line.is_silent(now):  # see Gather._expects
                    poll.stuck.add(node)
                self._send(node, line, poll, now)
            elif self._breakers.left_to_redelivery(round, node, now):
                poll.receive(node, failed(Failure.FAILED_LATELY))
            elif node in resting:
                if round.timeout:
                    poll.spared.add(node)
                else:
                    poll.receive(node, failed(Failure.FAILED_LATELY))
            elif not round.timeout:
                poll.receive(node, failed(Failure.NOT_CONNECTED))
            else:
                self._connect(node, poll)

    def _usable(self, node: int, round: Round, now: float) -> Line | None:
        """Return the line to send on, if there is one; drop a line that broke or has been silent for too long."""
        line = self._lines.get(node)
        if line is None:
            return None
        idle = now - line.silent_since
        if idle <= line.patience and idle <= IDLE and not line.link.broken:
            return line  # the usual case
        silent = line.is_silent(now)
        stale = not line.in_flight and idle > MAX_IDLE
        if not line.in_flight and idle > IDLE:
            round.note_rest()
        # The line has not been silent if replies have come that the event loop had no time to read.
        if not line.link.broken and (round.cleanup or not silent or line.link.readable()) and not stale:
            return line
        if silent and not line.link.broken and self._limits.late_within(idle):
            line.silent_since = now  # this event loop has been late, so the node gets its time again
            return line
        # Perhaps this process or its whole machine stood still. The attempt to connect again tells.
        self._retire(node)
        return None

    def _review(self, now: float) -> None:
        """Retire lines that no longer lead to their nodes, and ask nodes what they are if they said it long ago."""
        self._reviewed = self._admission.changes
        for node, line in list(self._lines.items()):
            if self._admission.disowns(node, line.server, now):
                self._retire(node)
            elif now > self._admission.due[node]:
                self._admission.asks(node, now)
                with suppress(LinkError):  # which the next request finds, too
                    line.link.greet(partial(self._greeted, node, line))

    def _greeted(self, node: int, line: Line, said: Greeting) -> None:
        line.server = said.run_id
        self._admission.greet(node, said)

    def _retire(self, node: int) -> None:
        """Send nothing more on a line, but let the replies come that other rounds may still wait for."""
        line = self._lines.pop(node)
        line.retired = True
        if line.in_flight and not line.link.broken:
            asyncio.get_running_loop().call_later(line.patience, line.link.close)
            self._retired.add(line.link)
        else:
            line.link.close()

    def _send(self, node: int, line: Line, poll: "PendingRound", now: float) -> None:
        round, breaker, admission = poll.round, self._breakers[node], self._admission

        def on_reply(reply: Reply | None) -> bool:
            if reply is None:
                return round.wanted
            line.in_flight -= 1
            if line.in_flight:
                line.silent_since = self._clock()
            elif line.retired:
                asyncio.get_running_loop().call_soon(line.link.close)
            if breaker.rest and reply.kind is not Kind.UNKNOWN:
                breaker.answered()
            poll.receive(node, admission.judge(node, reply, now))
            return False

        if not line.in_flight:
            line.silent_since, line.patience = now, 0.0
        line.patience = max(line.patience, round.timeout or SILENCE)
        line.in_flight += 1
        poll.sent.add(node)
        try:
            line.link.send(round.requests[node], poll.packed, on_reply, in_full=round.in_full())
        except LinkError as error:
            line.in_flight -= 1
            poll.receive(node, error.reply())

    def _connect(self, node: int, poll: "PendingRound") -> None:
        task = self._connecting.get(node)
        joined = task is not None
        if task is None:
            task = asyncio.get_running_loop().create_task(self._open(node, poll.round.timeout))
            self._connecting[node] = task
            # Removed in a callback, so that a round that finds no connection being made has seen all that were made.
            task.add_done_callback(lambda _: self._connecting.pop(node, None))

        def connected(task: "asyncio.Task[LinkError | None]") -> None:
            if poll.over or node in poll.round.replies:
                return
            if node in self._lines:
                # If nobody has been asked whose reply is missing, the time until now was that of making connections.
                if not (poll.sent - poll.round.replies.keys() or poll.round.closed):
                    self._limits.add(poll, poll.round.timeout)
                self._send(node, self._lines[node], poll, self._clock())
                return
            error = (None if task.cancelled() else task.result()) or LinkError(Failure.CLOSED)
            # The time of the round that began to connect may have passed, and not that of this one.
            if joined and error.failure in SILENT and self._clock() - poll.began < poll.round.timeout:
                self._connect(node, poll)
            else:
                poll.receive(node, error.reply())

        task.add_done_callback(connected)

    async def _open(self, node: int, timeout: float) -> LinkError | None:
        """Connect to a node; return the error if that failed, otherwise None."""
        began, seconds = self._clock(), connect_timeout(timeout)
        try:
            try:
                link = await self._nodes[node].aconnect(seconds)
            except LinkError as error:
                late = self._limits.late_within(self._clock() - began)
                if error.failure is not Failure.TIMEOUT or not (late or crowded(self._clock)):
                    raise
                began = self._clock()
                link = await self._nodes[node].aconnect(max(seconds, OWED))
            self._breakers[node].linking = self._clock() - began
            self._admission.greet(node, link.greeting)
            self._lines[node] = Line(link, link.greeting.run_id, silent_since=self._clock())
            return None
        except LinkError as error:
            if error.failure is Failure.TIMEOUT and self._limits.late_within(self._clock() - began):
                return LinkError(Failure.LATE)
            self._breakers[node].failed(self._clock(), error.detail, silent=error.failure is Failure.TIMEOUT)
            return error
        except Exception:  # whatever it was, the round must learn of it
            log.exception("connecting to lock node %s failed", self._nodes[node].name)
            self._breakers[node].failed(self._clock(), Failure.UNREACHABLE.value)
            return LinkError(Failure.UNREACHABLE)


@dataclass(eq=False, slots=True)
class PendingRound:
    """One round under way, and the future that its driver waits for."""

    round: Round
    began: float
    settled: asyncio.Future[None] | None = None
    packed: Packed = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    spared: set[int] = field(default_factory=set)
    stuck: set[int] = field(default_factory=set)
    over: bool = False
    looks: int = 0

    def missing(self) -> set[int]:
        """Return the nodes that have not replied."""
        return set(self.round.requests) - set(self.round.replies)

    def receive(self, node: int, reply: Reply) -> None:
        """Give a reply to the round, and wake the driver if that settles the round."""
        self.round.receive(node, reply)
        self.settle()

    def settle(self) -> None:
        """Wake the driver if the round is over."""
        if self.settled is None or self.settled.done():
            return
        in_vain = self.spared | self.stuck
        if self.round.closed or (in_vain and self.missing() <= in_vain):
            self.settled.set_result(None)


T = TypeVar("T")

AGAIN = 0.1  # seconds after which the second timer follows the first
EARLY = 0.001  # seconds by which a timer may come early, because event loops round times
NEVER = float("inf")


class TimeLimits(Generic[T]):
    """
    Call a function for each thing whose time limit has passed.

    A limit counts only the time for which the event loop was served, as :class:`~django_redlock.runtime.clock.Patience`
    does for threads. So a timer goes off several times within a limit. Where it is late, or the machine has too few
    processors, the time since the last time is counted apart.

    Nearly everything is discarded long before its limit, which sets and cancels no timer. The second timer is needed
    because an exception from a signal handler may end a callback of an event loop at any line; asyncio logs the
    exception and goes on.

    Args:
        passed: The function to call with a thing, and with whether this event loop was late; returns whether the thing
            is over. Otherwise, or if an exception ended the call, it is called again.
        clock: The clock that measures the leases.
    """

    def __init__(self, passed: Callable[[T, bool], bool], clock: Clock) -> None:
        self._passed = passed
        self._clock = clock
        self._limits: dict[T, tuple[float, float]] = {}  # what ``_served`` and ``_owed`` are then
        self._timers: tuple[asyncio.TimerHandle, ...] = ()
        self._looked = 0.0
        self._wake_at = NEVER
        self._part = NEVER  # seconds between two looks
        self._served = 0.0  # seconds for which the event loop was served
        self._owed = 0.0  # seconds for which it was to be served, but was late
        self._late_at = -NEVER

    def add(self, thing: T, seconds: float) -> None:
        """Call the function with *thing* after *seconds* seconds, unless the thing is discarded before."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._wake_at == NEVER:
            self._looked = now
        since = now - self._looked
        self._limits[thing] = self._served + since + seconds, self._owed + max(seconds, OWED)
        part = seconds / SLICES
        if part < self._part:
            self._part = part
        if now + part < self._wake_at:
            self._set_timers(loop, now + part)

    def discard(self, thing: T) -> None:
        """Forget *thing*."""
        self._limits.pop(thing, None)

    def late_within(self, seconds: float) -> bool:
        """Return whether the event loop has been late within the last *seconds* seconds, as far as is known."""
        loop = asyncio._get_running_loop()
        if loop is None:  # the loop is gone, and the coroutine that asks is only being closed
            return False
        now = loop.time()
        return now - self._late_at < seconds or now > self._wake_at + LATE

    def rest(self) -> None:
        """Drop the timers if they are not needed."""
        if not self._limits:
            self._wake_at = self._part = NEVER
            for timer in self._timers:
                timer.cancel()

    def _set_timers(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        before = self._timers
        self._timers = (loop.call_at(when, self._look), loop.call_at(when + AGAIN, self._look))
        self._wake_at = when
        for timer in before:
            timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        asked, took = self._wake_at - self._looked, now - self._looked
        self._looked = now
        self._set_timers(loop, now + AGAIN)  # in case an exception ends this call
        late = is_late(asked, took)
        if late:
            self._late_at = now
        if late or crowded(self._clock):
            self._owed += asked
        else:
            self._served += min(asked, took)
        for thing, (served, owed) in list(self._limits.items()):
            silent = served <= self._served + EARLY
            if (silent or owed <= self._owed) and self._passed(thing, not silent):
                self.discard(thing)
        if self._limits:
            first = min(self._limits.values())[0] - self._served
            self._set_timers(loop, now + max(EARLY, min(self._part, first)))
        else:
            self.rest()
