"""
Acquire a lock: attempts, fencing token, validity, pauses.

One attempt asks all nodes at once and proposes a fencing token with the request. A node accepts it only if it is
greater than any it accepted before; when a quorum accepted the same number, that is the token. When a quorum
granted the lock but not the number, one more round raises it. Two quorums share a node, and a node accepts
strictly increasing numbers, so tokens are unique and increase from hold to hold without any assumption about
clocks; the wall clock only makes the first proposal likely to succeed.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace

from . import owner as owners
from .messages import ANSWERS, Acquire, Ballot, Instant, Kind, Raise, Release, Reply, count
from .names import slug
from .rules import Rules

GRANTS = (Kind.ACCEPTED, Kind.GRANTED)


class Floor:
    """The highest token seen per name, in any reply: the next proposal goes above it. Bounded, oldest first."""

    def __init__(self, size: int = 10_000) -> None:
        self._size = size
        self._highest: OrderedDict[str, int] = OrderedDict()

    def of(self, slugs: Iterable[str]) -> int:
        """Return the highest number seen for any of *slugs*."""
        return max((self._highest.get(slug, 0) for slug in slugs), default=0)

    def lift(self, slugs: Iterable[str], number: int) -> None:
        """Remember that *number* has been seen for *slugs*."""
        for name in slugs:
            if number > self._highest.get(name, 0):
                self._highest[name] = number
                self._highest.move_to_end(name)
        while len(self._highest) > self._size:
            self._highest.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Wanted:
    """
    What a caller asks for.

    Args:
        names: The names to lock, sorted.
        ttl: Length of the lease, in seconds.
        wait: How long to try, in seconds; 0 is one attempt, None is for ever.
        owner: Who will hold it.
        nonce: The token to hold it with; empty draws a fresh one for every attempt.
        adopt: The token of a holder whose lock may be taken over.
        detached: Whether it is left to itself: neither renewed nor watched.
    """

    names: tuple[str, ...]
    ttl: float
    wait: float | None
    owner: owners.Owner
    nonce: str = ""
    adopt: str = ""
    detached: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """
    Wait so many seconds before the next attempt.

    Args:
        seconds: How long.
        silent: What the nodes said that gave no vote, if that is why there is no lock yet.
    """

    seconds: float
    silent: Mapping[int, Reply] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Granted:
    """A won lock; ``start`` and ``deadline`` in seconds on the client's steady clock."""

    nonce: str
    value: str
    token: int
    start: float
    deadline: float
    ballots: tuple[Ballot, ...]


@dataclass(frozen=True, slots=True)
class GaveUp:
    """
    The lock was not to be had.

    ``taken`` tells a held lock from nodes that could not tell, ``misconfigured`` that they never will.
    """

    taken: bool
    misconfigured: bool
    waited: float
    attempts: int
    replies: Mapping[int, Reply]
    retry_after: float | None
    holder: str


Step = Ballot | Pause


class Acquisition:
    """
    Try to take a lock until it is held or the time is over.

    A driver runs :meth:`steps`: it carries out each ballot or pause and sends back the time. When it is
    interrupted it sends :meth:`undo`, so that nothing of the attempt under way stays on a node.

    Args:
        wanted: The lock to take.
        rules: The numbers to work with.
        floor: The highest tokens seen in this process.
        fresh_nonce: Draws 128 random bits as 32 hexadecimal digits.
        chance: Draws a number from 0 to 1, for jitter.
    """

    def __init__(
        self,
        wanted: Wanted,
        rules: Rules,
        floor: Floor,
        fresh_nonce: Callable[[], str],
        chance: Callable[[], float],
    ) -> None:
        self.wanted = wanted
        self._rules = rules
        self._floor = floor
        self._fresh_nonce = fresh_nonce
        self._chance = chance
        self._slugs = tuple(slug(name) for name in wanted.names)
        self._ballots: list[Ballot] = []
        self._nonce = ""
        self._attempts = 0
        self.explained = False
        self._delay = rules.retry_delay

    def steps(self, at: Instant) -> Generator[Step, Instant, Granted | GaveUp]:
        """Run until the outcome; yields ballots and pauses, receives the time after each."""
        began = at.now
        while True:
            granted = yield from self._attempt(at)
            if granted is not None:
                return granted
            at = yield self.undo()
            left = self._time_left(began, at.now)
            if self._misconfigured() or (left is not None and left <= 0):
                return self._gave_up(at.now - began)
            pause = self._pause()
            at = yield Pause(pause if left is None else min(pause, left), self._silent())

    def undo(self, timeout: float = 0.0) -> Ballot:
        """
        Return the release of the attempt under way.

        Args:
            timeout: Seconds to wait for the replies, so that lost connections are made anew; 0 is not at all.
        """
        touched = {node for ballot in self._ballots for node in ballot.requests}
        return farewell(self._slugs, self._nonce, touched, self._ballots, self.wanted.ttl, timeout)

    def _attempt(self, at: Instant) -> Generator[Step, Instant, Granted | None]:
        self._attempts += 1
        self._ballots = []
        self._nonce = self.wanted.nonce or self._fresh_nonce()
        start, ttl = at.now, self.wanted.ttl
        value = owners.encode(self._nonce, replace(self.wanted.owner, since=at.wall / 1e6, ttl=ttl))
        token = max(at.wall, self._floor.of(self._slugs) + 1)
        ballot = self._ask_all(value, token)
        at = yield ballot
        self._observe(ballot)
        if ballot.count(Kind.ACCEPTED) < self._rules.needed:
            if ballot.count(*GRANTS) < self._rules.needed:
                return None
            token = self._floor.of(self._slugs) + 1
            second = self._raise_token(ballot, token)
            at = yield second
            self._observe(second)
            if second.count(Kind.ACCEPTED) < self._rules.needed:
                return None
        self._floor.lift(self._slugs, token)
        deadline = self._rules.deadline(start, ttl)
        if at.now + self._rules.least_validity(ttl) > deadline:
            return None
        return Granted(self._nonce, value, token, start, deadline, tuple(self._ballots))

    def _ask_all(self, value: str, number: int) -> Ballot:
        wanted, rules = self.wanted, self._rules
        request = Acquire(
            self._slugs, self._nonce, value, wanted.ttl, number, rules.fence_keep, rules.ahead, wanted.adopt
        )
        return self._ballot(dict.fromkeys(range(rules.nodes), request), self._first_round_decided)

    def _raise_token(self, first: Ballot, number: int) -> Ballot:
        request = Raise(self._slugs, self._nonce, number, self._rules.fence_keep)
        granted = [node for node, reply in first.replies.items() if reply.kind in GRANTS]
        return self._ballot(dict.fromkeys(granted, request), self._second_round_decided)

    def _ballot(self, requests: Mapping[int, object], decided: Callable[[Mapping[int, Reply]], bool]) -> Ballot:
        ballot = Ballot(
            requests=requests,  # type: ignore[arg-type]
            decided=decided,
            timeout=self._rules.timeout(self.wanted.ttl),
            needed=self._rules.needed,
            on_late=self._learn,
        )
        self._ballots.append(ballot)
        return ballot

    def _first_round_decided(self, replies: Mapping[int, Reply]) -> bool:
        """
        Tell whether nothing that is still to come could change what to do.

        A failure is called early only when its reason is certain as well: one holder has a quorum, or more nodes
        are silent than may be missing, and it is known whether for so many of them waiting is in vain.
        """
        rules = self._rules
        accepted, granted = count(replies, Kind.ACCEPTED), count(replies, *GRANTS)
        if accepted >= rules.needed:
            return True
        pending = rules.nodes - len(replies)
        if granted >= rules.needed and accepted + pending < rules.needed:
            return True
        hopeless = misconfigured(replies)
        explained = hopeless > rules.spare or hopeless + pending <= rules.spare
        return (silent(replies) > rules.spare and explained) or most_held(replies) > rules.spare

    def _second_round_decided(self, replies: Mapping[int, Reply]) -> bool:
        return count(replies, Kind.ACCEPTED) >= self._rules.needed

    def _observe(self, ballot: Ballot) -> None:
        for reply in ballot.replies.values():
            self._learn(reply)

    def _learn(self, reply: Reply) -> None:
        if reply.fence:
            self._floor.lift(self._slugs, reply.fence)

    def _time_left(self, began: float, now: float) -> float | None:
        """
        Return for how much longer to try.

        A split vote is nobody's lock. Giving up on it could leave every contender of a burst without one, so it is
        repeated for one node timeout more.
        """
        if self.wanted.wait is None:
            return None
        repeat = self._rules.timeout(self.wanted.ttl) if self._split() else 0.0
        return began + self.wanted.wait + repeat - now

    def _split(self) -> bool:
        """Tell whether contenders share the nodes that answer between them, so that none of them has a quorum."""
        replies = self._ballots[0].replies
        pending = self._rules.nodes - len(replies)
        contended = count(replies, Kind.BUSY) > 0 and silent(replies) <= self._rules.spare
        return contended and most_held(replies) + pending < self._rules.needed

    def _pause(self) -> float:
        """Return the next pause: decorrelated jitter, and no longer than the present hold can last."""
        shortest = self._rules.retry_delay
        if self._split():
            return shortest * self._chance()
        self._delay = min(10 * shortest, shortest + self._chance() * (3 * self._delay - shortest))
        free_in = self._free_in()
        return self._delay if free_in is None else min(self._delay, max(free_in, 0.02))

    def _free_in(self) -> float | None:
        """Return the seconds after which a quorum can be free by expiry alone, or None if never or unknown."""
        held = sorted(
            float("inf") if reply.left is None else reply.left
            for reply in self._ballots[0].replies.values()
            if reply.kind is Kind.BUSY
        )
        enough = len(held) - self._rules.spare
        if enough <= 0:
            return None
        return None if held[enough - 1] == float("inf") else max(held[enough - 1], 0.0)

    def _silent(self) -> Mapping[int, Reply]:
        """Return the replies without an answer, if there are so many that the lock cannot be had at all."""
        silent = {node: reply for node, reply in self._ballots[0].replies.items() if reply.kind not in ANSWERS}
        return silent if len(silent) > self._rules.spare else {}

    def _misconfigured(self) -> bool:
        """Tell whether no quorum is possible until servers or settings are changed, so that waiting is in vain."""
        return misconfigured(self._ballots[0].replies) > self._rules.spare

    def _gave_up(self, waited: float) -> GaveUp:
        replies = self._ballots[0].replies
        answered = len(replies) - silent(replies)
        busy = [reply for reply in replies.values() if reply.kind is Kind.BUSY]
        holders = [reply.detail for reply in busy if reply.detail]
        hopeless = self._misconfigured()
        return GaveUp(
            taken=not hopeless and (len(busy) > self._rules.spare or (bool(busy) and answered >= self._rules.needed)),
            misconfigured=hopeless,
            waited=waited,
            attempts=self._attempts,
            replies=replies,
            retry_after=self._free_in(),
            holder=max(set(holders), key=holders.count) if holders else "",
        )


def silent(replies: Mapping[int, Reply]) -> int:
    """Return how many replies say nothing of the lock."""
    return sum(reply.kind not in ANSWERS for reply in replies.values())


def misconfigured(replies: Mapping[int, Reply]) -> int:
    """Return how many nodes will not vote until they or the settings are changed."""
    return sum(reply.misconfigured for reply in replies.values())


def most_held(replies: Mapping[int, Reply]) -> int:
    """Return on how many nodes the same holder was in the way, for the holder who is on most."""
    holders = [reply.detail for reply in replies.values() if reply.kind is Kind.BUSY]
    return max(map(holders.count, holders), default=0)


def farewell(
    slugs: tuple[str, ...],
    nonce: str,
    nodes: Iterable[int],
    ballots: Iterable[Ballot],
    bury: float,
    timeout: float,
    needed: int | None = None,
) -> Ballot:
    """
    Return the release of one nonce on *nodes*; *needed* releases tell the outcome, None waits for all.

    A node of which a request in *ballots* is unanswered may execute it after the release; there the release
    leaves a marker for *bury* seconds that refuses it.
    """
    owing = {node for ballot in ballots for node in ballot.unanswered()}
    plain, burying = Release(slugs, nonce), Release(slugs, nonce, bury)
    return Ballot(
        requests={node: burying if node in owing else plain for node in nodes},
        decided=lambda replies: needed is not None and count(replies, Kind.RELEASED) >= needed,
        timeout=timeout,
        farewell=True,
    )
