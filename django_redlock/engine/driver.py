"""
Carry out the rounds of one alias, and follow up what they leave undone (internal).

If a finished round was a release, and a node missed it, the release is redelivered. A forked child has neither the
threads nor the connections of its parent, so it starts over.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..core.admission import Admission
from ..core.round import Round
from ..core.rules import Rules
from ..nodes.base import Node
from ..runtime.process import process
from ..runtime.threads import exiting
from .connections import PerLoop
from .notifications import AsyncNotifications, Notifications
from .presence import Presence, this_process
from .redelivery import Redelivery
from .rounds import Gather
from .rounds_async import AsyncGather
from .unattended import Ended, UnattendedReleases
from .watchdog import Dog, Runtime

Report = Callable[..., None]

log = logging.getLogger("django_redlock")


class LoopSide(NamedTuple):
    """The connections of an alias in one event loop, and what runs there in the background."""

    gather: AsyncGather
    notifications: AsyncNotifications
    heartbeat: Presence


class Driver:
    """
    The connections of one alias and what runs in the background, for threads and for each event loop.

    Args:
        alias: The alias, for the log.
        nodes: The nodes, in the order of the settings.
        rules: The options of the alias, which say how many nodes make a quorum.
        admission: Which nodes may vote.
        runtime: The clock and the watchdogs.
        report: Called with ``node_down`` or ``node_up`` and the arguments of the signal of that name.
        keeper: The manager of the leases for which this process sends a heartbeat.
    """

    def __init__(
        self,
        alias: str,
        nodes: Sequence[Node],
        rules: Rules,
        admission: Admission,
        runtime: Runtime,
        report: Report,
        keeper: object,
    ) -> None:
        self._alias = alias
        self._nodes = nodes
        self._rules = rules
        self.admission = admission
        self._runtime = runtime
        self._report = report
        self.dropped: deque[float] = deque(maxlen=1000)  # the ends of leases that were dropped without a release
        self._keeper = keeper
        self.gather = Gather(nodes, admission, runtime.clock)
        self.notifications = Notifications(nodes, self._rules.needed, runtime.clock)
        self.redelivery = Redelivery(nodes, runtime.clock)
        self.unattended = self._new_unattended()
        self.heartbeat = self._new_presence(runtime.watchdog)
        self.loops = PerLoop(self.new_loop_side)
        self.pid = process.pid
        self._hanging_up = False

    def ask(self, round: Round) -> None:
        """Carry out one round, blocking the calling thread for at most the round's timeout."""
        if exiting():  # nothing may connect or wait any more
            round.close()
            return
        if self.pid != process.pid:
            self.notice_fork()
        try:
            self.gather.ask(round)
        except BaseException:
            self.follow_up(round, round.unanswered())
            raise
        if self.gather.breakers.news or (round.lasting and not round.complete):
            self.follow_up(round)

    async def aask(self, round: Round) -> None:
        """Carry out one round in the running event loop."""
        try:
            await self.loop_side().gather.ask(round)
        except BaseException:
            self.follow_up(round, round.unanswered())
            raise
        self.follow_up(round)

    def leave(self, round: Round, timeout: float, ended: Ended) -> bool:
        """
        Send a release that is *unattended*, from a thread.

        Args:
            round: The release.
            timeout: Seconds after which the nodes that have not answered count as silent.
            ended: Called with the round later, in any thread, when its outcome is known.

        Returns:
            Whether the outcome is known already; then *ended* is not called.
        """
        if self.pid != process.pid:
            self.notice_fork()
        try:
            connections = self.gather.ask(round, timeout)
            if connections is not None and not round.closed:
                self.unattended.add(round, connections, timeout, ended)
                return False
        except BaseException:
            self.follow_up(round, round.unanswered())
            raise
        self.follow_up(round)
        return True

    def aleave(self, round: Round, timeout: float, ended: Ended) -> bool:
        """Do what :meth:`leave` does from the event loop, which calls *ended*; never blocks."""

        def over(round: Round) -> None:
            self.follow_up(round)
            ended(round)

        try:
            if self.loop_side().gather.leave(round, timeout, over):
                return False
        except BaseException:
            self.follow_up(round, round.unanswered())
            raise
        self.follow_up(round)
        return True

    def send(self, round: Round) -> None:
        """Send a round from the event loop without waiting, so that a second cancellation cannot stop it."""
        self.loop_side().gather.send(round)
        self.follow_up(round)

    def follow_up(self, round: Round, unsure: Iterable[int] = ()) -> None:
        """Have a release redelivered to the nodes that missed it, and to those that an interruption left *unsure*."""
        if self.gather.breakers.news:
            self._report_nodes()
        if not round.lasting or (round.complete and not unsure):
            return
        round.report_missed(self._redeliver, unsure)

    def bring(self, round: Round) -> None:
        """Have a release redelivered to the nodes that have not answered it, without a network call."""
        self._redeliver(round, round.unanswered() | round.missed())

    def loop_side(self) -> LoopSide:
        """Return the connections and the background tasks of the running event loop."""
        self.notice_fork()
        return self.loops.get()

    def new_loop_side(self) -> LoopSide:
        """Make the connections and background tasks of an event loop that has none yet."""
        clock = self._runtime.clock
        gather = AsyncGather(self._nodes, self.admission, self.gather.breakers, clock)
        notifications = AsyncNotifications(self._nodes, self._rules.needed)
        return LoopSide(gather, notifications, self._new_presence(self._runtime.loop_watchdog()))

    def notice_fork(self) -> None:
        """Drop what belongs to the parent of a fork; its sockets are closed, not shut down."""
        if self.pid != process.pid:
            with process.mutex:
                if self.pid != process.pid:  # still: no other thread was quicker
                    self._begin_anew()

    def close(self) -> None:
        """Close all idle connections of this process's threads, and end what runs in the background."""
        process.notice_fork()
        self.notice_fork()  # otherwise a child waits for mutexes that the parent's threads held at the fork
        self.unattended.look(wait=True)
        self.redelivery.close()
        self.heartbeat.leave()
        self.notifications.close()
        self._hang_up()
        self._runtime.watchdog.rest()

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        side = self.loops.pop()
        if side:
            side.heartbeat.leave()
            await side.notifications.aclose()
            await side.gather.aclose()
        self._runtime.loop_watchdog().rest()

    def _redeliver(self, round: Round, nodes: set[int]) -> None:
        if not self._hanging_up:
            self.redelivery.take(round.to_redeliver(nodes), self._runtime.clock() + round.lasting)

    def _report_nodes(self) -> None:
        """Report which nodes went down or came back, once for each change, whoever noticed it."""
        news = self.gather.breakers.news
        while news:
            try:
                number, down, why = news.popleft()
            except IndexError:  # another thread was quicker
                return
            node = self._nodes[number].name
            about = {"node": node, "alias": self._alias}
            if down:
                about |= {"event": "node_down", "reason": why}
                log.warning("lock node down: %s (%s): %s", node, self._alias, why, extra=about)
                self._report("node_down", node=node, reason=why)
            else:
                log.info("lock node up: %s (%s)", node, self._alias, extra=about | {"event": "node_up"})
                self._report("node_up", node=node)

    def _hang_up(self) -> None:
        """Close the idle connections; requests in flight are not redelivered, because they are on their way."""
        self._hanging_up = True
        self.gather.close()
        self._hanging_up = False

    def _new_presence(self, dog: Dog) -> Presence:
        owner, clock = this_process(since=self._runtime.wall()), self._runtime.clock
        return Presence(self._keeper, self._rules, self.ask, self.aask, owner, dog, clock, self.dropped)

    def _new_unattended(self) -> UnattendedReleases:
        return UnattendedReleases(self.gather, self.follow_up, self._runtime.watchdog, self._runtime.clock)

    def _begin_anew(self) -> None:
        self.unattended = self._new_unattended()
        self.redelivery = Redelivery(self._nodes, self._runtime.clock)
        self.heartbeat = self._new_presence(self._runtime.watchdog)
        self.notifications.forked()
        self.notifications = Notifications(self._nodes, self._rules.needed, self._runtime.clock)
        self._hang_up()
        self.loops = PerLoop(self.new_loop_side)
        self.pid = process.pid  # last: otherwise other threads would use the parent's links and read its replies
