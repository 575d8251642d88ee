"""
Decide which nodes may vote (internal).

A node that restarted without its data would vote for a second holder. "Distributed Locks with Redis" asks the operator
to keep such a node down for one ttl ("Performance, crash recovery and fsync"); here the client does it. A restart cuts
every connection, so each new connection asks for the server's run id and for how long this server has served the locks.
While that age is below the length of the longest lease, the node gives no vote. The age is not the server's uptime: a
replica may have run for weeks before it is promoted, and an emptied server keeps running. That all nodes are new to the
locks is no reason to vote at once: they may have taken the addresses of nodes whose locks are still held, and a server
that was never used proves nothing about those.

A server may also change while a connection lives: it may be emptied, or promoted after it was a replica. So it has a
mark, see :class:`Greeting`, which each request that takes or extends a lock names; and what a server says about itself
is asked again after ten seconds of use.

A replica, a cluster node, a server that is listed twice and a node that may evict keys give no vote either. Requests
still go to such nodes: their keys keep other callers out.

Nodes expire keys by their wall clock, so a node whose clock ran forward has dropped keys too early. Every reply carries
the node's time, and two checks use it to find such a node. A client that knows the node sees its clock jump between two
replies, and gives it no vote until every earlier lease has ended. A client that has just started compares the nodes
with each other. A node whose clock is far from most of the others gives no vote while that lasts; once its clock is set
back, it gives none until every earlier lease has ended. A client cannot notice a step that is undone before it asks the
node.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .protocol import FAR, HIGHEST, POSITIVE, Kind, Reply, believable, no_vote
from .rules import EXPIRY_ROUNDING, Rules

MAX_SKEW = 1.0  # seconds by which the clocks of nodes may disagree for a client that has just started
CLOCK_GUARD = "OPTIONS['clock_guard'], which tests that freeze or move the time set to False"
INFINITY = float("inf")
NEVER = (0.0, "", "")
NEW = "restarted or is new to these locks"
SAME_LOSS = 1.0  # seconds by which two measurements of the same age may differ
FRESH = 1.0  # seconds for which a node's clock is not examined again unless a reply narrows it down
YOUNG = 8.0  # seconds after which a node that is asked something is also asked to describe itself again
OLD = 10.0  # seconds after which nothing that a node said about itself counts any more
SILENT = 2 * OLD  # seconds after which a node that says nothing no longer votes for a server that is listed twice
ASKED = 1.0  # seconds for which other connections leave it to the one that has just asked
EVEN = EXPIRY_ROUNDING / 2  # seconds; a larger difference does not come from a slow reply: the clock was set
CLOCK_RATE = 0.001  # seconds that a clock may gain in one second without having been set; NTP slews by half of that


@dataclass(frozen=True, slots=True)
class Greeting:
    """
    How a node describes itself on a new connection.

    Args:
        run_id: Changes with every start; empty if the node does not report one.
        age: Seconds for which the server has certainly kept all locks, by its own clock; None if it does not report
            this.
        evicts: Whether the node may drop keys when its memory is full.
        promoted: Changes each time the node becomes a master after it was a replica; empty if it does not remember
            having been a replica.
        refused: Why the node does not describe itself, such as ``NOPERM``.
        mark: What tells the node's present memory from every other; empty if the node has none. A request that takes
            or extends a lock is carried out only by the memory that its link learned.
    """

    run_id: str = ""
    age: float | None = None
    evicts: bool = False
    promoted: str = ""
    refused: str = ""
    mark: str = ""


class Admission:
    """
    The nodes of an alias that may vote; shared by all threads and event loops.

    Args:
        rules: The options of the alias.
        names: The nodes' names, in the order of the settings.
        clock: Returns seconds on the client's steady clock.
        wall: Returns seconds since the epoch; the client's own clock is compared too while fewer than three nodes are
            known.

    ``doubts`` has the nodes whose clocks are far from most others', and why they do not vote at present. ``due`` has
    when each node is to describe itself again, and ``next_due`` the earliest of these times; see :meth:`asks`.
    ``servers`` has the run id that each node had last, and ``changes`` counts how often one of them changed.
    """

    def __init__(
        self,
        rules: Rules,
        names: tuple[str, ...],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._rules = rules
        self._guards_clocks, self._compares_clocks = rules.guards_clocks, rules.compares_clocks
        self._names = names
        self._clock = clock
        self._wall = wall
        self._run_ids: dict[int, str] = {}
        self._promotions: dict[int, str] = {}
        self._met: dict[int, float] = {}  # when this process first heard of the present run
        # The mark of the node's memory, and since when it has served the locks, as it said last.
        self._memories: dict[int, tuple[str, float]] = {}
        self._last_reply: dict[int, float] = {}
        self._quarantined: dict[int, tuple[float, str, str]] = {}  # until when, why, and the option
        self._excluded: dict[int, str] = {}
        # How far each node's clock is ahead of our steady one: at least, and at most.
        self._least = [-INFINITY] * len(names)
        self._most = [INFINITY] * len(names)
        self._looked = [0.0] * len(names)  # when each node's clock was last examined
        self.doubts: Mapping[int, str] = {}
        self.due = [-INFINITY] * len(names)
        self.next_due = -INFINITY
        self.servers = [""] * len(names)
        self.changes = 0
        self._greeted = [-INFINITY] * len(names)
        self._voters: dict[str, int] = {}  # which node votes for a server, by its run id

    def asks(self, node: int, now: float) -> None:
        """
        Note that a request to a node that is *due* is about to ask it to describe itself again.

        While what the node said is still young enough to count, one connection asks for all. Otherwise each one does,
        because its vote may be counted before another one's answer comes.
        """
        if now - self._greeted[node] < OLD:
            self._put_off(node, now + ASKED)

    def _put_off(self, node: int, until: float) -> None:
        self.due[node] = until
        self.next_due = min(self.due)

    def disowns(self, node: int, server: str, now: float) -> bool:
        """
        Return whether a connection to *server*, by its run id, leads or may lead elsewhere than the node's address.

        Another connection to the node was greeted by another server since. Or two nodes said that they are the same
        server: one of their addresses is wrong, and may have been corrected.
        """
        if server != self.servers[node]:
            return True
        return now > self.due[node] and server != "" and self.servers.count(server) > 1

    def greet(self, node: int, greeting: Greeting, when: float | None = None) -> None:
        """Note how a node describes itself, or did *when*, on a new connection or when it was asked again."""
        now = self._clock()
        self._greeted[node] = when = now if when is None else when
        self._put_off(node, when + YOUNG)
        if self._rules.guards_restarts and self._names[node] not in self._rules.durable and not greeting.refused:
            self._quarantine(node, greeting)
        if self.servers[node] != greeting.run_id:
            self.servers[node] = greeting.run_id
            self.changes += 1
        if greeting.run_id:
            self._run_ids[node], self._promotions[node] = greeting.run_id, greeting.promoted
        self._excluded[node] = self._exclusion(node, greeting, now)

    def judge(self, node: int, reply: Reply, sent: float) -> Reply:
        """Return *reply* to a request that was sent at *sent*, without its vote if the node may not vote."""
        now, fence, time = self._clock(), reply.fence, reply.time
        if fence > time + FAR or fence >= HIGHEST:
            reply = believable(reply)
        if time:
            self._last_reply[node] = now
            if self._guards_clocks:
                least, most = time / 1e6 - now, time / 1e6 - sent
                known_least, known_most = self._least[node], self._most[node]
                # Skip the reply if the clock was examined a moment ago, the reply agrees with that, and it does not
                # narrow the bounds. A slow reply proves less than an earlier, quick one. Keeping the narrow bounds lets
                # small steps of a clock add up, instead of being forgotten one by one.
                if not (
                    now - self._looked[node] < FRESH
                    and least < known_most + EVEN
                    and known_least < most + EVEN
                    and known_most - known_least < most - least + EVEN
                ):
                    self._look_at_clock(node, least, most, now)
        if reply.kind not in POSITIVE or not (node in self._quarantined or self._excluded.get(node)):
            return reply
        # A reply to a request that was sent during the quarantine does not count, even if it is read afterwards.
        if why := self._quarantine_left(node, sent):
            return no_vote(reply, why, votes_in=max(0.0, self._quarantined[node][0] - now))
        if why := self._excluded.get(node, ""):
            return no_vote(reply, why, Kind.EXCLUDED)
        return reply

    def objection(self, node: int, when: float | None = None) -> str:
        """Return why a node may not vote, now or at the time *when*; empty if it may."""
        return self._quarantine_left(node, when) or self._excluded.get(node, "")

    def _quarantine_left(self, node: int, when: float | None = None) -> str:
        """Return why a node is in quarantine, and for how much longer; empty if it is not."""
        until, what, option = self._quarantined.get(node, NEVER)
        now = self._clock()
        if until > (now if when is None else when):
            left = max(0.0, until - now)
            return f"{what}, votes again in {left:.0f} s ({option})"
        return ""

    def exclusion(self, node: int) -> str:
        """Return why a node never votes as it is configured; empty if it may vote."""
        return self._excluded.get(node, "")

    def _look_at_clock(self, node: int, least: float, most: float, now: float) -> None:
        """Note by how many seconds a node's clock is ahead of ours, at least and at most."""
        since = now - self._looked[node]
        self._looked[node] = now
        forward, back = least - self._most[node], self._least[node] - most
        # The drift allowance of a usual lease would tolerate a larger step. That of the shortest leases covers little
        # more than the rounding.
        allowed = EXPIRY_ROUNDING + CLOCK_RATE * since
        if forward > allowed:
            why = f"its clock ran {forward:.3f} s forward"
            self._quarantined[node] = (now + self._rules.guard, why, CLOCK_GUARD)
        elif back > allowed and node in self.doubts:  # a new client saw the clock only while it was ahead
            why = f"its clock went {back:.3f} s back to the others'"
            self._quarantined[node] = (now + self._rules.guard, why, CLOCK_GUARD)
        self._least[node], self._most[node] = least, most
        if self._compares_clocks:
            self._compare_clocks(now)

    def _compare_clocks(self, now: float) -> None:
        least, most = self._least, self._most
        if most.count(INFINITY) > len(most) - 3:  # fewer than three are known
            own = self._wall() - now
            least, most = [*least, own], [*most, own]
        if max(least) - min(most) <= MAX_SKEW:
            self.doubts = {}
            return
        known = [(low, high) for low, high in zip(least, most, strict=True) if high != INFINITY]
        self.doubts = {
            node: f"its clock is far from the others' ({CLOCK_GUARD})"
            for node, (low, high) in enumerate(zip(self._least, self._most, strict=True))
            if 2 * sum(low - MAX_SKEW <= top and bottom - MAX_SKEW <= high for bottom, top in known) <= len(known)
        }

    def _exclusion(self, node: int, greeting: Greeting, now: float) -> str:
        if greeting.refused and self._rules.guards_restarts:
            return f"refuses INFO ({greeting.refused})"
        if greeting.evicts and self._names[node] not in self._rules.allow_evicting:
            return "may evict keys (OPTIONS['allow_evicting'])"
        if not greeting.run_id:
            return ""
        # One server has one vote, whoever lists it twice: that of the node that was asked first. Of two threads that
        # greet it under two names at once, the second one finds the first one's node here.
        voter = self._voters.setdefault(greeting.run_id, node)
        if voter == node:
            return ""
        if self.servers[voter] == greeting.run_id and now - self._greeted[voter] < SILENT:
            return f"is the same server as {self._names[voter]}"
        self._voters[greeting.run_id] = node
        return ""

    def _quarantine(self, node: int, greeting: Greeting) -> None:
        """Keep a node from voting until every lease that it may have forgotten has ended."""
        now = self._clock()
        known = self._run_ids.get(node, greeting.run_id)
        # A promoted node has the data of the master that it followed meanwhile. (A node forgets its promotion after a
        # while.)
        promoted = greeting.promoted and self._promotions.get(node, greeting.promoted) != greeting.promoted
        new = node not in self._met
        if known != greeting.run_id or promoted or new:
            self._met[node] = now
        # If a server does not report its age, count from the first greeting of this run. A count that began anew with
        # each connection would keep the node from ever voting.
        age = now - self._met[node] if greeting.age is None else greeting.age
        up = max(0.0, age - 1)  # some servers count whole seconds, so the age may be nearly one too high
        # Another memory that has served the locks for longer is an earlier one that came back, as after SWAPDB.
        mark, began = self._memories.get(node, (greeting.mark, 0.0))
        other = greeting.mark not in ("", mark) and now - age < began - SAME_LOSS
        if greeting.mark:  # else the server could not say it this time
            self._memories[node] = greeting.mark, now - age
        if known != greeting.run_id or promoted or other:
            # A clock that ran forward makes the age too long; this process knows better when the old run last answered.
            up = min(up, now - self._last_reply.get(node, now))
        until = now + self._rules.guard - up
        before, what, _ = self._quarantined.get(node, NEVER)
        if until > before:
            if until > before + SAME_LOSS:
                same = known == greeting.run_id and not new  # another run id may be that of another server
                what = "was a replica" if promoted else "was emptied" if same else NEW
            self._quarantined[node] = (until, what, "OPTIONS['restart_guard']")
