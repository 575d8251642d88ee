"""
Acquire a lock: attempts, fencing token, validity, pauses.

One attempt asks all nodes at once and proposes a fencing token with the request. A node accepts it only if it is
greater than any it accepted before; when a quorum accepted the same number, that is the token. When a quorum
granted the lock but not the number, one more round raises it. Two quorums share a node, and a node accepts
strictly increasing numbers, so tokens are unique and increase from hold to hold without any assumption about
clocks; the wall clock only makes the first proposal likely to succeed.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from . import owner as owners
from .names import place, slug
from .replies import ABSENT, ANSWERS, Kind, Reply, is_absurd
from .requests import HIGHEST, Acquire, Instant, Raise, Release, Request, Survey
from .round import Round, count
from .rules import Rules

GRANTS = (Kind.ACCEPTED, Kind.GRANTED)
VOTELESS = (Kind.NO_VOTE, Kind.EXCLUDED)
REFUSALS = (Kind.BUSY, Kind.QUEUED)

POLL = 1.0  # seconds after which a waiter asks again at the latest, though it is told when it is its turn
LEAST_POLL = 0.02  # seconds between two looks at a hold that is about to end
FEW_PLACES = 3  # of a lock with several: so many are tried without asking first which are taken
PATIENCE = 0.005  # seconds for which who waits hears out the nodes that have not refused it yet
UNTOLD_POLL = 0.05  # seconds, for each place in the queue, while too few nodes could tell it


class HighestToken:
    """The highest token seen per name, in any reply: the next proposal goes above it. Bounded, oldest first."""

    def __init__(self, size: int = 10_000) -> None:
        self._size = size
        self._highest: OrderedDict[str, int] = OrderedDict()

    def of(self, slugs: Iterable[str]) -> int:
        """Return the highest number seen for any of *slugs*."""
        return max((self._highest.get(slug, 0) for slug in slugs), default=0)

    def lift(self, slugs: Iterable[str], number: int) -> None:
        """Remember that *number* has been seen for *slugs*, unless no node could accept a higher one."""
        if number >= HIGHEST:
            return
        for name in slugs:
            if number > self._highest.get(name, 0):
                self._highest[name] = number
                self._highest.move_to_end(name)
        while len(self._highest) > self._size:
            self._highest.popitem(last=False)


class Wanted(NamedTuple):
    """
    What a caller asks for.

    Args:
        names: The names to lock, sorted.
        ttl: Length of the lease, in seconds.
        wait: How long to try, in seconds; 0 is one attempt, None is for ever.
        owner: Who will hold it, and for how long.
        nonce: The token to hold it with; empty draws a fresh one for every attempt. A node that did not answer an
            attempt in time refuses the same token for one ttl more: it could not tell another attempt from that one.
        adopt: The token of a holder whose lock may be taken over.
        strict: Whether it must be taken over, from *adopt* or from an earlier hold with the same *nonce*; a free one is
            refused like a taken one, of whose holder nothing is known.
        detached: Whether it is left to itself: neither renewed nor watched.
        limit: How many may hold it at once, each in a place of its own.
        shared: Whether other shared holders may have it too.
        barge: Whether to ignore those that wait.
        heartbeat: After how many seconds without a sign of life it is no longer extended; None needs none.
        max_hold: Longest time that renewal keeps it, in seconds; None is as the rules say.
    """

    names: tuple[str, ...]
    ttl: float
    wait: float | None
    owner: owners.Owner
    nonce: str = ""
    adopt: str = ""
    detached: bool = False
    limit: int = 1
    shared: bool = False
    barge: bool = False
    heartbeat: float | None = None
    max_hold: float | None = None
    strict: bool = False


class Waiter:
    """
    One who waits for a lock, as the nodes' queues know it.

    Acts on notifications from a quorum of nodes only. A holder often lacks one node. Every waiter that asks is then
    granted that node and gives it back. If a single notification were enough, that would wake the next waiter, and so
    on without end.
    Who gives back what it got in vain is called by these nodes itself, if it is first in line there. That is no news.

    Args:
        name: Its name in the queues: ``process|number``.
        needed: Notifications from how many nodes make it ask again.
    """

    def __init__(self, name: str, needed: int) -> None:
        self.name = name
        self._needed = needed
        self._heard: set[int] = set()
        self._given_back: Set[int] = frozenset()
        self._recalled = False

    def hear(self, node: int) -> bool:
        """Take a node's notification that it is first in line; returns whether it is time to ask."""
        self._heard.add(node)
        return self.called

    def recall(self) -> None:
        """Have it ask again, whatever it has heard: it may have missed something."""
        self._recalled = True

    @property
    def called(self) -> bool:
        """Whether a quorum told it or would grant again what it gave back, with news of one; or it is to ask anyway."""
        enough = len(self._heard | self._given_back) >= self._needed
        return self._recalled or (enough and not self._heard <= self._given_back)

    def attend(self) -> None:
        """Begin to listen anew: what was heard until now has led to the attempt that begins."""
        self._heard.clear()
        self._given_back = frozenset()
        self._recalled = False

    def gives_back(self, nodes: Set[int]) -> None:
        """Note the nodes that granted the attempt, which was in vain, and will call it for what it gives back."""
        self._given_back = nodes


class Pause(NamedTuple):
    """
    Wait before the next attempt, until the waiter is called.

    Args:
        seconds: For how long, if too few nodes can tell the waiter that its turn has come.
        told: For how long if a quorum of nodes can.
        silent: What the nodes said that gave no vote, if that is why there is no lock yet.
    """

    seconds: float
    told: float
    silent: Mapping[int, Reply] = MappingProxyType({})


class Granted(NamedTuple):
    """
    A won lock.

    Args:
        slugs: The names that are held, as they stand in the keys.
        nonce: The token to hold it with.
        value: What the nodes store: the nonce and who holds it.
        token: The fencing token.
        start: When the winning round began, in seconds on the client's steady clock.
        deadline: When the lease ends, on the same clock.
        rounds: The rounds of the attempt; some of their replies may still be on their way.
        leaving: The waiter that leaves the queue with the release; empty if none is in it.
        queue: The slug whose queue counts, for a lock with several places.
        untouched: The nodes that certainly have nothing of it, neither the lock nor the waiter.
        waited: How long it took from the first attempt on, in seconds.
    """

    slugs: tuple[str, ...]
    nonce: str
    value: str
    token: int
    start: float
    deadline: float
    rounds: tuple[Round, ...]
    leaving: str = ""
    queue: str = ""
    untouched: frozenset[int] = frozenset()
    waited: float = 0.0


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


Step = Round | Pause


class Acquisition:
    """
    Try to take a lock until it is held or the time is over.

    A driver runs :meth:`steps`: it carries out each round or pause and sends back the time. When it is
    interrupted it sends :meth:`undo`, so that nothing of the attempt under way stays on a node.

    Args:
        wanted: The lock to take.
        rules: The numbers to work with.
        floor: The highest tokens seen in this process.
        fresh_nonce: Draws 128 random bits as 32 hexadecimal digits.
        chance: Draws a number from 0 to 1, for jitter.
        waiter: Its name in the queues of the nodes; empty does not queue.
    """

    def __init__(
        self,
        wanted: Wanted,
        rules: Rules,
        highest: HighestToken,
        fresh_nonce: Callable[[], str],
        chance: Callable[[], float],
        waiter: str = "",
    ) -> None:
        self.wanted = wanted
        self.waiter = Waiter(waiter, rules.needed)
        self.explained = False
        self._rules = rules
        self._highest = highest
        self._fresh_nonce = fresh_nonce
        self._chance = chance
        self._slugs = tuple(slug(name) for name in wanted.names)
        self._timeout = rules.timeout(wanted.ttl, len(wanted.names))
        self._queue = self._slugs[0] if wanted.limit > 1 else ""
        self._at = Instant(0.0, 0)
        self._stamp = 0
        self._began = 0.0
        self._nonce = ""
        self._trying = self._slugs
        self._attempts = 0
        self._delay = rules.retry_delay
        self._rounds: list[Round] = []  # of the attempt under way
        self._withdrawn: list[Round] = []  # of the one before, which has the same nonce until the next begins
        self._replies: Mapping[int, Reply] = {}  # of the last attempt's first round
        self._enrolled: set[int] = set()

    def steps(self, at: Instant) -> Generator[Step, Instant, Granted | GaveUp]:
        """Run until the outcome; yields rounds and pauses, receives the time after each."""
        self._at, self._stamp, self._began = at, at.wall, at.now
        while True:
            self.waiter.attend()
            if self.wanted.limit == 1:
                granted = yield from self._attempt(self._slugs)
            else:
                granted = yield from self._try_places()
            if granted is not None:
                return granted
            self.waiter.gives_back(self._granted())
            left = self._time_left()
            over = self._misconfigured() or (left is not None and left <= 0)
            yield from self._withdraw(leaving=over or self._cut_off())
            if over:
                return self._gave_up(self._at.now - self._began)
            self._at = yield self._pause(self._time_left())

    def undo(self, timeout: float = 0.0) -> Round:
        """
        Return the release of the attempt under way, and of the place in the queue.

        Args:
            timeout: Seconds to wait for the replies, so that lost connections are made anew; 0 is not at all.
        """
        return self._withdrawal(leaving=True, timeout=timeout)

    def _try_places(self) -> Generator[Step, Instant, Granted | None]:
        """Make one attempt for each place of a lock with several, unless that is in vain or takes too long."""
        places = self._places()
        asked = len(places) <= FEW_PLACES
        while places:
            yield from self._withdraw(leaving=False)
            granted = yield from self._attempt(places.pop(0))
            if granted is not None:
                return granted
            if count(self._replies, Kind.QUEUED) > self._rules.spare or self._cut_off() or self._overdue():
                return None
            if not asked:
                asked = True
                yield from self._withdraw(leaving=False)
                places = yield from self._not_taken(places)
        return None

    def _not_taken(self, places: list[tuple[str, ...]]) -> Generator[Step, Instant, list[tuple[str, ...]]]:
        """Return the places that a quorum may be free in, to try no others: a round for each would take its time."""
        rules = self._rules
        survey = Survey(tuple(slug for (slug,) in places))
        round = Round(
            requests=dict.fromkeys(range(rules.nodes), survey),
            decided=lambda replies: count(replies, Kind.LISTED) >= rules.needed,
            timeout=self._timeout,
            needed=rules.needed,
        )
        self._at = yield round
        ours = {self.wanted.nonce, self.wanted.adopt} - {""}
        rows = [row for reply in round.replies.values() for row in reply.rows]
        taken = Counter(row.slug for row in rows if row.left != ABSENT and owners.nonce_of(row.value) not in ours)
        return [(slug,) for (slug,) in places if taken[slug] <= rules.spare]

    def _overdue(self) -> bool:
        """Tell whether the time has been over for a node timeout."""
        left = self._time_left()
        return left is not None and left <= -self._timeout

    def _places(self) -> list[tuple[str, ...]]:
        limit = self.wanted.limit
        first = int(self._chance() * limit)
        return [(place(self._queue, (first + number) % limit + 1),) for number in range(limit)]

    def _attempt(self, slugs: tuple[str, ...]) -> Generator[Step, Instant, Granted | None]:
        self._attempts += 1
        self._trying, self._withdrawn = slugs, []
        self._nonce = self.wanted.nonce or self._fresh_nonce()
        start, ttl = self._at.now, self.wanted.ttl
        value = self._value()
        token = max(self._at.wall, self._above_floor())
        round = yield from self._ask_all(value, token)
        if round.count(Kind.ACCEPTED) < self._rules.needed:
            if round.count(*GRANTS) < self._rules.needed:
                return None
            # Our clock may be too far ahead for the nodes, who may have forgotten every token: theirs stands in for it.
            token = max(self._above_floor(), granting_time(round.replies))
            second = yield from self._raise_token(round, token)
            if second.count(Kind.ACCEPTED) < self._rules.needed:
                return None
        self._highest.lift(slugs, token)
        deadline = self._rules.deadline(start, ttl)
        if self._at.now + self._rules.least_validity(ttl) > deadline:
            return None
        rounds, leaving = tuple(self._rounds), self.waiter.name
        # With a nonce that is not of this attempt alone, a node may have something of an earlier hold.
        untouched = frozenset() if self.wanted.nonce else frozenset(round.untouched() - self._enrolled)
        waited = self._at.now - self._began
        return Granted(
            slugs, self._nonce, value, token, start, deadline, rounds, leaving, self._queue, untouched, waited
        )

    def _above_floor(self) -> int:
        """
        Return the lowest token that is above every one seen; 0 if that was absurd.

        A fence of the database may hold any number. The lock can be taken all the same, and the fence refuses it.
        """
        highest = self._highest.of(self._trying)
        return 0 if is_absurd(highest, self._at.wall) else highest + 1

    def _value(self) -> str:
        """Return what to store. Of shared holders no node knows more than that they are shared."""
        if self.wanted.shared:
            return owners.encode(self._nonce, owners.Owner(kind="shared", ttl=self.wanted.ttl))
        return owners.encode_since(self._nonce, self.wanted.owner, self._at.wall / 1e6)

    def _ask_all(self, value: str, number: int) -> Generator[Step, Instant, Round]:
        wanted, rules = self.wanted, self._rules
        request = Acquire(
            self._trying,
            self._nonce,
            value,
            wanted.ttl,
            number,
            rules.fence_keep,
            rules.ahead,
            wanted.adopt,
            self.waiter.name,
            self._stamp,
            wanted.barge,
            wanted.shared,
            self._queue,
            wanted.strict,
        )
        requests = dict.fromkeys(range(rules.nodes), request)
        round = yield from self._ask(requests, partial(first_round_decided, self._rules))
        self._replies = round.replies
        if self.waiter.name:
            self._enrolled |= round.may_queue()
        return round

    def _raise_token(self, first: Round, number: int) -> Generator[Step, Instant, Round]:
        request = Raise(self._trying, self._nonce, number, self._rules.fence_keep, self.wanted.shared)
        granted = [node for node, reply in first.replies.items() if reply.kind in GRANTS]
        return (yield from self._ask(dict.fromkeys(granted, request), partial(second_round_decided, self._rules)))

    def _ask(
        self, requests: Mapping[int, Request], decided: Callable[[Mapping[int, Reply]], bool]
    ) -> Generator[Step, Instant, Round]:
        round = Round(
            requests=requests,
            decided=decided,
            timeout=self._timeout,
            needed=self._rules.needed,
            on_late=partial(learn, self._highest, self._trying),
            patience=PATIENCE if self.waiter.name else 0.0,
        )
        self._rounds.append(round)
        self._at = yield round
        self._highest.lift(self._trying, max([reply.fence for reply in round.replies.values()], default=0))
        return round

    def _withdraw(self, *, leaving: bool) -> Generator[Step, Instant, None]:
        """Give back what the attempt got, so that nobody finds it in the way."""
        if not self._rounds and not (leaving and self._enrolled):
            return
        round = self._withdrawal(leaving=leaving)
        if round.requests:
            self._at = yield round
        # Not before, or an interruption would leave what has not been given back to nobody.
        self._withdrawn, self._rounds = self._rounds, []
        if leaving:
            self._enrolled = set()

    def _withdrawal(self, *, leaving: bool, timeout: float = 0.0) -> Round:
        """
        Return the release of the attempt under way, to all nodes that may have executed it.

        A node that refused, or that was never asked, has nothing of ours but perhaps a place in its queue.
        """
        nodes = {node for round in self._rounds for node in round.may_hold()}
        waiter = self.waiter.name if leaving else ""
        if waiter:
            # A round that was interrupted has not been counted yet.
            nodes |= self._enrolled.union(*(round.may_queue() for round in self._rounds))
        release = Release(self._trying, self._nonce, 0.0, waiter, self.wanted.shared, self._queue)
        unsure = unanswered([*self._withdrawn, *self._rounds])
        # A lock that is left alone may last for hours, and each refusal of one would leave a tombstone for as long.
        undo = cleanup(release, nodes, unsure, min(self.wanted.ttl, self._rules.max_ttl), timeout)
        undo.lasting = self.wanted.ttl
        return undo

    def _time_left(self) -> float | None:
        """
        Return for how much longer to try.

        A split vote is nobody's lock. Giving up on it could leave every contender of a burst without one, so it is
        repeated for one node timeout more.
        """
        if self.wanted.wait is None:
            return None
        repeat = self._timeout if self._split() else 0.0
        return self._began + self.wanted.wait + repeat - self._at.now

    def _split(self) -> bool:
        """Tell whether contenders share the nodes that answer between them, so that none of them has a quorum."""
        pending = self._rules.nodes - len(self._replies)
        contended = count(self._replies, Kind.BUSY) > 0 and silent(self._replies) <= self._rules.spare
        in_the_way = most_held(self._replies) + count(self._replies, Kind.QUEUED)
        return contended and in_the_way + pending < self._rules.needed

    def _cut_off(self) -> bool:
        """Tell whether too few nodes answered: who cannot win must not be first in line on those it reaches."""
        return silent(self._replies) > self._rules.spare

    def _granted(self) -> set[int]:
        """Return the nodes that granted the last attempt, and be it without a vote."""
        return {node for node, reply in self._replies.items() if reply.kind in (*GRANTS, *VOTELESS)}

    def _pause(self, left: float | None) -> Pause:
        """
        Return the next pause, no longer than the present hold can last.

        A split vote is repeated soon, but not in lock-step. Who may be told of its turn asks seldom; who may not asks
        more often, and the sooner the nearer its turn is. Who lacks nothing but votes is told by nobody.
        """
        shortest, places = self._rules.retry_delay, [reply.place for reply in self._replies.values()]
        free_in = self._free_in()
        told = POLL if free_in is None else min(POLL, max(free_in, LEAST_POLL))
        told += LEAST_POLL * self._chance()
        if self._split():
            seconds = told = shortest * self._chance()
        elif max(places, default=-1) >= 0 and not self._cut_off() and len(self._granted()) < self._rules.needed:
            seconds = min(told, UNTOLD_POLL * (max(places) + self._chance()))
        else:
            self._delay = min(10 * shortest, shortest + self._chance() * (3 * self._delay - shortest))
            seconds = told = min(told, self._delay)
        limit = float("inf") if left is None else max(left, 0.0)
        return Pause(min(seconds, limit), min(told, limit), self._silent())

    def _free_in(self) -> float | None:
        """Return the seconds after which a quorum can be free by expiry alone, or None if never or unknown."""
        held = sorted(
            float("inf") if reply.left is None else reply.left
            for reply in self._replies.values()
            if reply.kind is Kind.BUSY
        )
        enough = len(held) - self._rules.spare
        if enough <= 0:
            return None
        return None if held[enough - 1] == float("inf") else max(held[enough - 1], 0.0)

    def _silent(self) -> Mapping[int, Reply]:
        """Return the replies without an answer, if there are so many that the lock cannot be had at all."""
        silent = {node: reply for node, reply in self._replies.items() if reply.kind not in ANSWERS}
        return silent if len(silent) > self._rules.spare else {}

    def _misconfigured(self) -> bool:
        """Tell whether no quorum is possible until servers or settings are changed, so that waiting is in vain."""
        return misconfigured(self._replies) > self._rules.spare

    def _gave_up(self, waited: float) -> GaveUp:
        refused = [reply for reply in self._replies.values() if reply.kind in REFUSALS]
        holders = [owners.uncounted(reply.detail) for reply in refused if reply.detail]
        hopeless = self._misconfigured()
        return GaveUp(
            taken=not hopeless and (len(refused) > self._rules.spare or (bool(refused) and not self._cut_off())),
            misconfigured=hopeless,
            waited=waited,
            attempts=self._attempts,
            replies=self._replies,
            retry_after=self._free_in(),
            holder=max(set(holders), key=holders.count) if holders else "",
        )


# What a round asks of its replies holds on to nothing of the attempt: a cycle would leave every lock to the garbage
# collector, which in a large process costs more than the lock.


def first_round_decided(rules: Rules, replies: Mapping[int, Reply]) -> bool:
    """
    Tell whether nothing that is still to come could change what to do.

    A failure is called early only when its reason is certain as well: one holder has a quorum, or more nodes
    are silent than may be missing, and it is known whether for so many of them waiting is in vain.
    """
    accepted = count(replies, Kind.ACCEPTED)
    if accepted >= rules.needed:
        return True
    if accepted == len(replies):
        return False  # as it should be, so far
    granted = count(replies, *GRANTS)
    pending = rules.nodes - len(replies)
    if granted >= rules.needed and accepted + pending < rules.needed:
        return True
    if most_held(replies) + count(replies, Kind.QUEUED) > rules.spare:
        return True
    hopeless = misconfigured(replies)
    explained = hopeless > rules.spare or hopeless + pending <= rules.spare
    return explained and silent(replies) > rules.spare


def second_round_decided(rules: Rules, replies: Mapping[int, Reply]) -> bool:
    """Tell whether the raised token has a quorum."""
    return count(replies, Kind.ACCEPTED) >= rules.needed


def learn(highest: HighestToken, slugs: tuple[str, ...], reply: Reply) -> None:
    """Remember the highest token that a node has seen."""
    highest.lift(slugs, reply.fence)


def silent(replies: Mapping[int, Reply]) -> int:
    """Return how many replies say nothing of the lock."""
    return sum([reply.kind not in ANSWERS for reply in replies.values()])


def misconfigured(replies: Mapping[int, Reply]) -> int:
    """Return how many nodes will not vote until they or the settings are changed."""
    return sum([reply.misconfigured for reply in replies.values()])


def granting_time(replies: Mapping[int, Reply]) -> int:
    """Return what the slowest clock of the nodes that granted shows, in microseconds; 0 if none says."""
    return min([reply.time for reply in replies.values() if reply.kind in GRANTS and reply.time], default=0)


def most_held(replies: Mapping[int, Reply]) -> int:
    """
    Return on how many nodes the same holder was in the way, for the holder who is on most.

    A node that missed an extension has counted fewer.
    """
    said = [reply.detail for reply in replies.values() if reply.kind is Kind.BUSY]
    if said.count(said[0] if said else "") == len(said):  # as a rule
        return len(said)
    holders = list(map(owners.uncounted, said))
    return max(map(holders.count, holders))


def unanswered(rounds: Iterable[Round]) -> set[int]:
    """Return the nodes that may still execute a request of one of *rounds*."""
    return {node for round in rounds for node in round.unanswered()}


def cleanup(
    release: Release,
    nodes: Iterable[int],
    unsure: Collection[int],
    tombstone: float,
    timeout: float,
    needed: int | None = None,
) -> Round:
    """
    Return the round that sends *release* to *nodes*; *needed* releases tell the outcome, None waits for all.

    An *unsure* node may execute an earlier request after the release. There the release leaves a tombstone, which
    refuses such requests for *tombstone* seconds.
    """
    burying = release._replace(tombstone=tombstone) if unsure else release
    return Round(
        requests={node: burying if node in unsure else release for node in nodes},
        decided=lambda replies: needed is not None and count(replies, Kind.RELEASED) >= needed,
        timeout=timeout,
        needed=needed or 0,
        cleanup=True,
        lasting=tombstone,
    )
