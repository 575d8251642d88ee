"""
Acquire a lock: make one attempt after another until the lock is held or ``wait`` has passed (internal).

Nothing here knows a clock, a network or a thread. A driver carries out the rounds and the pauses, and reports the time
after each, so the blocking driver, the asyncio driver and the simulation run the same code.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Set
from types import MappingProxyType
from typing import NamedTuple

from .attempt import NEVER, NO_REPLIES, Attempt, Granted, HighestToken
from .names import SECRET_SIZE, common_value, permit_slug, secret_of, slug, uncounted
from .protocol import ABSENT, Instant, Release, Reply
from .round import Round, unanswered
from .rules import Rules, Wanted
from .votes import Verdict, is_quorum, prevents_quorum

FIRST_PAUSE = 0.001  # seconds after which the contender that came first asks again; each later pause is twice as long
CONTEST = 2  # node timeouts for which a contender in a split vote goes on; the one that came first, twice as many
FEW_PERMITS = 3  # with no more permits than this, each is tried without asking first which are taken
POLL = 1.0  # seconds after which a waiter asks again, even though nodes would notify it of its turn
LEAST_POLL = 0.02  # least seconds before a waiter asks again about a hold that is about to end
UNNOTIFIED_POLL = 0.05  # seconds of pause per waiter ahead in the queue, while too few nodes can notify this one
LASTED = 10.0  # seconds after which a failure that might have passed by itself is called a wrong setting


class GaveUp(Verdict):
    """
    The acquisition ended without the lock.

    Args:
        verdict: The meaning of the last replies.
        waited: Seconds for which the acquisition tried.
        attempts: How many attempts it made.
        lasted: Seconds for which failures that might have passed by themselves have kept it from a quorum.
    """

    __slots__ = ("attempts", "lasted", "waited")

    def __init__(self, verdict: Verdict, waited: float, attempts: int, lasted: float) -> None:
        super().__init__(verdict.replies, verdict.rules)
        self.waited = waited
        self.attempts = attempts
        self.lasted = lasted

    @property
    def misconfigured(self) -> bool:
        """Whether no quorum is possible until servers or settings change."""
        return super().misconfigured or self.lasted >= LASTED


class Pause(NamedTuple):
    """
    Wait before the next attempt, or until a node notifies the waiter.

    Args:
        seconds: How long to wait if too few nodes can notify the waiter of its turn.
        notified: How long to wait, in seconds, if a quorum of nodes can.
        silent: The replies of nodes that gave no vote, if their silence is why the caller has no lock yet.
    """

    seconds: float
    notified: float
    silent: Mapping[int, Reply] = MappingProxyType({})


Step = Round | Pause


class Acquisition:
    """
    Try to take a lock until it is held or ``wait`` has passed.

    A driver runs :meth:`steps`: it carries out each round or pause and sends back the time. If the driver is
    interrupted, it carries out :meth:`undo`, so that no node keeps anything of the attempt under way.

    Args:
        wanted: The lock to take.
        rules: The options of the alias.
        highest: The highest tokens seen in this process.
        fresh_secret: Draws 128 random bits as 32 hexadecimal digits.
        chance: Draws a number from 0 to 1, for jitter.
        waiter: The waiter's name in the nodes' queues; a caller with an empty name joins no queue.
    """

    def __init__(
        self,
        wanted: Wanted,
        rules: Rules,
        highest: HighestToken,
        fresh_secret: Callable[[], str],
        chance: Callable[[], float],
        waiter: str = "",
    ) -> None:
        self.wanted = wanted
        self.waiter = Waiter(waiter, rules.needed) if waiter else NOBODY
        self.explained = False
        self._rules = rules
        self._highest = highest
        self._fresh_secret = fresh_secret
        self._chance = chance
        self._delay = rules.retry_delay
        self._slugs = tuple(map(slug, wanted.names))
        self._timeout = rules.timeout(wanted.ttl, len(wanted.names))
        self._queue = self._slugs[0] if wanted.limit > 1 else ""
        self._since = NEVER
        self._attempts = 0
        self._again = True  # whether the last attempt may be repeated, if it found links that had been cut
        self._failing_since: float | None = None  # since when only failures that may last have been in the way
        self._earlier: set[str] = set()  # see Attempt
        # The nodes that may have the waiter in their queue. A queue outlasts an attempt, so this set does too. Somebody
        # who comes back may be in any queue.
        self._enrolled: set[int] = set(range(rules.nodes)) if wanted.place else set()
        # The current attempt, or the last one. The first one exists before it begins, so that an interruption at any
        # moment finds an attempt to undo.
        self._attempt = self._new_attempt(self._slugs, NEVER)

    def steps(self, at: Instant) -> Generator[Step, Instant, Granted | GaveUp]:
        """Yield rounds and pauses, and return the outcome; the driver sends the time after each of them."""
        self._attempt.at = self._since = at
        while True:
            if self.wanted.limit == 1:
                granted = yield from self._begin(self._slugs).steps(self._since)
            else:
                granted = yield from self._try_permits()
            if granted is None and self._attempt.verdict.split:
                granted = yield from self._contend()
            if granted is not None:
                return granted
            verdict = self._attempt.verdict
            if self._again and self._was_cut(verdict) and self._is_over(verdict):
                self._again = False
                granted = yield from self._repeat()
                if granted is not None:
                    return granted
                verdict = self._attempt.verdict
            self.waiter.gives_back(verdict.granted)
            if not verdict.perhaps_misconfigured:
                self._failing_since = None
            elif self._failing_since is None:
                self._failing_since = self._attempt.at.now
            over = self._is_over(verdict)
            # A waiter that cannot win leaves the queues that it reaches: as the first one there, it would keep out
            # everybody who can.
            yield from self._withdraw(leaving=(over and not self.wanted.place) or verdict.cut_off)
            if over:
                return GaveUp(verdict, self._attempt.at.now - at.now, self._attempts, self._lasted)
            self._attempt.at = yield self._pause(verdict)
            self.waiter.attend()

    def _is_over(self, verdict: Verdict) -> bool:
        """Return whether the time has passed, or waiting is pointless; who would wait for ever learns of it, too."""
        left = self._time_left()
        return verdict.pointless or (self._lasted >= LASTED if left is None else left <= 0)

    @property
    def _lasted(self) -> float:
        """For how many seconds only failures that may last have been in the way."""
        return 0.0 if self._failing_since is None else self._attempt.at.now - self._failing_since

    def _was_cut(self, verdict: Verdict) -> bool:
        """
        Return whether links of the last attempt were cut, so that it is repeated although the time has passed.

        An idle link that was cut shows that only when it is used. The nodes may be well, and a caller that tries once
        would be refused for nothing.
        """
        return any(round.cut for round in self._attempt.rounds) and not verdict.taken

    def _repeat(self) -> Generator[Step, Instant, Granted | None]:
        """
        Repeat the last attempt with the same secret.

        A node may have executed it although no reply came, or may do so at any moment: the request is in a buffer of
        the connection that was cut. To such a node the attempt and its repetition are one owner. With another secret,
        the caller would be refused because of itself.
        """
        attempt = self._attempt
        if attempt.given_back:  # after a split vote
            attempt = self._begin(attempt.slugs)
        else:
            self._attempts += 1
        granted = yield from attempt.steps(self._since)
        if granted is None and self.wanted.limit > 1:
            granted = yield from self._try_permits()
        return granted

    def _pause(self, verdict: Verdict) -> Pause:
        """
        Return the next pause, which is hardly longer than the present hold can last.

        A waiter relies on being notified, and asks again by itself only because a notification can be lost. A contender
        that nobody will notify backs off with random pauses that grow, as "Exponential Backoff And Jitter" (AWS
        Architecture Blog) recommends under the name "decorrelated jitter".
        """
        shortest, free_in = self._rules.retry_delay, verdict.retry_after
        poll = POLL if free_in is None else min(POLL, max(free_in, LEAST_POLL))
        notified = poll + LEAST_POLL * self._chance()
        if verdict.split:
            # The contenders gave back what they had, so one of them wins soon unless all of them ask again at the same
            # moment.
            seconds = notified = shortest * self._chance()
        elif verdict.last_position >= 0 and not verdict.cut_off and not verdict.lacks_votes:
            # The waiter is in a queue, so nodes will notify it. While too few nodes can, it asks again by itself, after
            # pauses that get shorter as its turn comes nearer.
            seconds = min(notified, UNNOTIFIED_POLL * (verdict.last_position + self._chance()))
        else:
            # No node will notify the caller: it is in no queue, or it lacks only votes, which no release brings. The
            # pause is from the shortest to three times the previous one, at most ten times the shortest.
            self._delay = min(10 * shortest, shortest + self._chance() * (3 * self._delay - shortest))
            seconds = notified = min(notified, self._delay)
        left = self._time_left()
        limit = float("inf") if left is None else max(left, 0.0)
        return Pause(min(seconds, limit), min(notified, limit), verdict.silent)

    def undo(self, timeout: float = 0.0) -> Round:
        """
        Return the round that releases the attempt under way and leaves the queue.

        Args:
            timeout: Seconds to wait for the replies, so that lost connections can be replaced; 0 does not wait.
        """
        return self._withdrawal(self._traces(leaving=True), leaving=True, timeout=timeout)

    def _begin(self, slugs: tuple[str, ...], skipped: Mapping[int, Reply] = NO_REPLIES) -> Attempt:
        """Return the next attempt, which takes *slugs* and asks all nodes but those *skipped*."""
        if self._attempts or slugs is not self._slugs:
            self._attempt = self._new_attempt(slugs, self._attempt.at)
        self._attempts += 1
        self._attempt.skipped = skipped
        return self._attempt

    def _new_attempt(self, slugs: tuple[str, ...], at: Instant) -> Attempt:
        # Each attempt has a fresh secret, unless the caller chose one. A late request of a released attempt then finds
        # that attempt's own tombstone, and cannot harm the next attempt.
        secret = self.wanted.secret or self._fresh_secret()
        name, timeout = self.waiter.name, self._timeout
        return Attempt(
            self.wanted, slugs, secret, self._rules, self._highest, name, timeout, self._enrolled, at, self._earlier
        )

    def _contend(self) -> Generator[Step, Instant, Granted | None]:
        """
        Decide a split vote: go on until one of the contenders has a quorum of the nodes that answer.

        If all contenders gave up after a split vote, nobody would have the lock: a job that every server starts would
        run nowhere. So the contender that came first keeps the nodes that it has and asks again for the others, soon
        and with the same secret, while those that came later give theirs back and ask again after a random pause. The
        one that came first goes on for longer, so at the latest it wins when the others have given up.

        Silent nodes are not asked again. Each of these attempts would otherwise wait for them.
        """
        began, pause, skipped = self._attempt.at.now, FIRST_PAUSE, self._attempt.verdict.unanswering
        while (verdict := self._attempt.verdict).split:
            attempt = self._attempt
            first = bool(verdict.granted) and verdict.precedes(attempt.value)
            until = began + CONTEST * (2 if first else 1) * self._timeout
            if first:
                seconds = pause * (1.0 + self._chance())
                pause = min(2 * pause, self._rules.retry_delay)
            else:
                self.waiter.gives_back(verdict.granted)
                yield from self._withdraw(leaving=False)
                seconds = self._rules.retry_delay * self._chance()
            if attempt.at.now + seconds >= until:
                return None
            attempt.at = yield Pause(seconds, seconds)
            self.waiter.attend()
            if first:
                self._attempts += 1
                attempt.skipped = skipped
            else:
                attempt = self._begin(attempt.slugs, skipped)
            granted = yield from attempt.steps(self._since)
            if granted is not None:
                return granted
        return None

    def _try_permits(self) -> Generator[Step, Instant, Granted | None]:
        """Try the permits of the lock one after another, until none can be free or the time has passed."""
        permits = self._permits()
        asked = len(permits) <= FEW_PERMITS
        while permits:
            yield from self._withdraw(leaving=False)
            granted = yield from self._begin(permits.pop(0)).steps(self._since)
            if granted is not None:
                return granted
            verdict, left = self._attempt.verdict, self._time_left()
            # All permits share one queue. Where others wait in it, the next permit is refused for the same reason. And
            # with many permits, an attempt may go on for one node timeout after its time, but not for one per permit.
            if verdict.behind_others or verdict.cut_off or (left is not None and left <= -self._timeout):
                return None
            if not asked:
                asked = True
                yield from self._withdraw(leaving=False)
                permits = yield from self._not_taken(permits)
        return None

    def _not_taken(self, permits: list[tuple[str, ...]]) -> Generator[Step, Instant, list[tuple[str, ...]]]:
        """
        Return the permits that may be free on a quorum of the nodes, with one round instead of one per permit.

        None is free while somebody holds the lock in another way: alone, as a reader, or with another limit.
        """
        rules = self._rules
        round = Round.to_find_free((self._queue, *(slug for (slug,) in permits)), rules, self._timeout)
        self._attempt.at = yield round
        ours = {self.wanted.secret, self.wanted.adopt, secret_of(common_value(self.wanted.limit))} - {""}
        rows = [row for reply in round.replies.values() for row in reply.rows]
        taken = Counter(row.slug for row in rows if row.left != ABSENT and secret_of(row.value) not in ours)
        in_use = taken[self._queue]
        return [(slug,) for (slug,) in permits if not prevents_quorum(max(taken[slug], in_use), rules)]

    def _permits(self) -> list[tuple[str, ...]]:
        """Return the permits of the lock, starting at a random one, so that contenders do not all try the first."""
        if self.wanted.permit:
            return [(permit_slug(self._queue, self.wanted.permit),)]
        limit = self.wanted.limit
        first = int(self._chance() * limit)
        return [(permit_slug(self._queue, (first + number) % limit + 1),) for number in range(limit)]

    def _withdraw(self, *, leaving: bool, timeout: float = 0.0) -> Generator[Step, Instant, None]:
        """Give back what the attempt was granted, so that it blocks no other caller; see :meth:`undo`."""
        attempt = self._attempt
        if nodes := self._traces(leaving):
            attempt.at = yield self._withdrawal(nodes, leaving, timeout)
        # Set only now: an interruption before this line must find what has not been given back.
        attempt.given_back = True
        if not (self.wanted.secret or self.wanted.shared) and unanswered(attempt.rounds):
            self._earlier.add(uncounted(attempt.value[SECRET_SIZE:]))
        if leaving:
            self._enrolled.clear()

    def _traces(self, leaving: bool) -> set[int]:
        """
        Return the nodes that may have something of the attempt under way, or, if *leaving*, the waiter in their queue.

        A node that refused the attempt, or was never asked, has at most the waiter in its queue.
        """
        attempt, queued = self._attempt, leaving and bool(self.waiter.name)
        nodes = set(self._enrolled) if queued else set()
        if not attempt.given_back:
            for round in attempt.rounds:
                nodes |= round.may_hold()
                if queued:  # the queues of an interrupted round are not in ``_enrolled`` yet
                    nodes |= round.may_queue()
        return nodes

    def _withdrawal(self, nodes: set[int], leaving: bool, timeout: float) -> Round:
        """Return the round that releases the attempt under way on *nodes*, and takes the waiter out of their queues."""
        attempt, waiter = self._attempt, self.waiter.name if leaving else ""
        release = Release(attempt.slugs, attempt.secret, 0.0, waiter, self.wanted.shared, self._queue)
        # A detached lock may last for hours, and each failed attempt would leave a tombstone for just as long.
        tombstone = min(self.wanted.ttl, self._rules.max_ttl)
        # An attempt that was already given back still counts: a node that has not answered may execute its request
        # after this release.
        unsure = unanswered(attempt.rounds)
        same_secret = bool(self.wanted.secret) and not self.wanted.shared
        if same_secret:
            # The next attempt has the same secret. A release of this one that is redelivered must not end its hold: the
            # caller would believe that it has the lock, and another caller could get it. The number of this attempt
            # tells the two holds apart only if the next attempt proposes a higher one, even if the wall clock is set
            # back meanwhile.
            self._highest.lift(attempt.slugs, attempt.number)
        return Round.to_release(
            release,
            nodes,
            timeout,
            unsure=unsure,
            tombstone=tombstone,
            lasting=max(self.wanted.ttl, self.wanted.hold_for),
            granting=attempt.rounds if same_secret else None,
            number=attempt.number,
        )

    def _time_left(self) -> float | None:
        """Return for how many more seconds to try; None is for ever."""
        return None if self.wanted.wait is None else self._since.now + self.wanted.wait - self._attempt.at.now


class Waiter:
    """
    A caller that waits for a lock, as the nodes' queues know it.

    The waiter acts only on notifications from a quorum of nodes. A holder often lacks one node. Every waiter that asks
    is then granted that node and gives it back. If a single notification were enough, that release would wake the next
    waiter, and so on without end.

    A waiter that gives back grants without a quorum is notified by those nodes itself, if it is first in their queues.
    Such a notification is no news.

    Args:
        name: The waiter's name in the queues: ``process|number``.
        needed: How many nodes must notify the waiter before it asks again.
    """

    __slots__ = ("_given_back", "_heard", "_needed", "_recalled", "name")

    def __init__(self, name: str, needed: int) -> None:
        self.name = name
        self._needed = needed
        self._heard: set[int] = set()
        self._given_back: Set[int] = frozenset()
        self._recalled = False

    def hear(self, node: int) -> bool:
        """Note a node's notification that the waiter is first in its queue; return whether it is time to ask."""
        self._heard.add(node)
        return self.called

    def recall(self) -> None:
        """Have the waiter ask again in any case, because it may have missed a notification."""
        self._recalled = True

    @property
    def called(self) -> bool:
        """
        Whether it is time to ask again.

        That takes a quorum of nodes that have notified the waiter, or that it gave a grant back to. At least one
        notification must be news: from a node that the waiter gave nothing back to. A recall needs neither.
        """
        enough = is_quorum(len(self._heard | self._given_back), self._needed)
        return self._recalled or (enough and not self._heard <= self._given_back)

    def attend(self) -> None:
        """Forget the notifications so far, because a new attempt begins."""
        self._heard.clear()
        self._given_back = frozenset()
        self._recalled = False

    def gives_back(self, nodes: Set[int]) -> None:
        """Note the nodes that granted the failed attempt; they will notify the waiter when it gives the grants back."""
        self._given_back = nodes


NOBODY = Waiter("", 0)
"""The waiter that all callers share that do not wait: it is in no queue, so it gets no notification."""
