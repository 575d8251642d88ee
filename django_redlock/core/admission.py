"""
Who may vote.

A node that restarted without its data would vote for a second holder. "Distributed Locks with Redis" asks the
operator to keep such a node down for one ttl ("Performance, crash recovery and fsync"); here the client does it: a
restart cuts every connection, so each new connection asks for the node's run id and uptime, and a node gives no
vote until the longest lease of before has passed. A replica, a cluster node, the same server twice and a node that
may evict keys give none either. Requests still go to such nodes: their keys keep others out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from .messages import Kind, Reply
from .rules import Rules

POSITIVE = frozenset({Kind.ACCEPTED, Kind.GRANTED, Kind.HELD})


@dataclass(frozen=True, slots=True)
class Greeting:
    """
    What a node says of itself on a new connection.

    Args:
        run_id: Changes with every start; empty when the node does not say.
        uptime: Seconds since its start, by its own clock; None when it does not say.
        role: ``master`` or something that does not vote.
        mode: ``standalone`` or something that does not vote.
        evicts: Whether it may drop keys when its memory is full.
        promoted: Whether it was a replica before; then ``uptime`` counts from then on at the latest, if that is known.
        refused: Why it says nothing of itself, such as ``NOPERM``.
    """

    run_id: str = ""
    uptime: float | None = None
    role: str = "master"
    mode: str = "standalone"
    evicts: bool = False
    promoted: bool = False
    refused: str = ""


class Admission:
    """
    Which nodes of an alias may vote; shared by all that ask them.

    Args:
        rules: The numbers to work with.
        names: The nodes' names, in the order of the settings.
        clock: Returns seconds on the client's steady clock.
    """

    def __init__(self, rules: Rules, names: tuple[str, ...], clock: Callable[[], float]) -> None:
        self._rules = rules
        self._names = names
        self._clock = clock
        self._run_ids: dict[int, str] = {}
        self._last_reply: dict[int, float] = {}
        self._quarantined: dict[int, float] = {}
        self._excluded: dict[int, str] = {}

    def greet(self, node: int, greeting: Greeting) -> None:
        """Take what a node says of itself on a new connection."""
        self._excluded[node] = self._exclusion(node, greeting)
        if self._rules.guards_restarts and self._names[node] not in self._rules.durable and not greeting.refused:
            self._quarantine(node, greeting)
        if greeting.run_id:
            self._run_ids[node] = greeting.run_id

    def judge(self, node: int, reply: Reply) -> Reply:
        """Return *reply*, without its vote if the node may not vote."""
        if reply.kind not in POSITIVE:
            return reply
        why = self.objection(node)
        if why:
            lasting = why == self._excluded.get(node)
            return replace(reply, kind=Kind.EXCLUDED if lasting else Kind.NO_VOTE, detail=why)
        self._last_reply[node] = self._clock()
        return reply

    def objection(self, node: int) -> str:
        """Return why a node may not vote, or nothing."""
        left = self._quarantined.get(node, 0.0) - self._clock()
        if left > 0:
            return f"restarted, votes again in {left:.0f} s (OPTIONS['restart_guard'])"
        return self._excluded.get(node, "")

    def _exclusion(self, node: int, greeting: Greeting) -> str:
        if greeting.refused and self._rules.guards_restarts:
            return f"refuses INFO ({greeting.refused})"
        if greeting.role != "master":
            return f"is a {greeting.role}, not a master"
        if greeting.mode != "standalone":
            return f"runs in {greeting.mode} mode"
        if greeting.evicts and self._names[node] not in self._rules.allow_evicting:
            return "may evict keys (OPTIONS['allow_evicting'])"
        for other, run_id in self._run_ids.items():
            if run_id == greeting.run_id and other != node:
                return f"is the same server as {self._names[other]}"
        return ""

    def _quarantine(self, node: int, greeting: Greeting) -> None:
        """Keep a node from voting until every lease that it may have forgotten has ended."""
        up = max(0.0, (greeting.uptime or 0.0) - 1)  # whole seconds, so it may be nearly one too many
        known = self._run_ids.get(node, greeting.run_id)
        now = self._clock()
        if known != greeting.run_id:
            # A clock that ran forward makes the uptime too long; we know better when the old run still answered.
            up = min(up, now - self._last_reply.get(node, now))
        self._quarantined[node] = max(self._quarantined.get(node, 0.0), now + self._rules.guard - up)
