"""
The time a lock is held: its deadline, its extensions, its end.

An extension must *complete* before the deadline it extends, and the new deadline counts from the *start* of its
round. A lease that lapsed is never revived, even if all its keys are still there. The number of extensions and
the time of holding are bounded, as "Distributed Locks with Redis" asks ("Making the algorithm more reliable:
Extending the lock").
"""

from collections.abc import Mapping

from .acquisition import Floor, Granted, farewell
from .messages import ANSWERS, Ballot, Extend, Kind, Reply, count
from .names import slug
from .rules import Rules


class Tenure:
    """
    One held lock, from grant to end.

    Args:
        names: The names held.
        ttl: Length of the lease, in seconds.
        granted: The won acquisition.
        rules: The numbers to work with.
        floor: The highest tokens seen in this process.
    """

    def __init__(self, names: tuple[str, ...], ttl: float, granted: Granted, rules: Rules, floor: Floor) -> None:
        self.names = names
        self.ttl = ttl
        self.nonce = granted.nonce
        self.token = granted.token
        self.since = granted.start
        self.deadline = granted.deadline
        self.extensions = 0
        self.ended: str | None = None
        self.ended_at = 0.0
        self._value = granted.value
        self._rules = rules
        self._floor = floor
        self._slugs = tuple(slug(name) for name in names)
        self._renew_at = granted.start + ttl / 3
        self._ballots: list[Ballot] = list(granted.ballots)

    # What the clock alone says

    def remaining(self, now: float) -> float:
        """Return the seconds of validity left, 0 when it ended."""
        return 0.0 if self.ended else max(0.0, self.deadline - now)

    def end(self, reason: str, now: float) -> bool:
        """End it for good; the first reason stays. Returns whether this call ended it."""
        if self.ended:
            return False
        self.ended, self.ended_at = reason, now
        return True

    def check(self, now: float) -> bool:
        """Return whether it is still valid; end it if its time is over."""
        if not self.ended and now >= self.deadline:
            self.end(self._reason_of_lapse(), now)
        return not self.ended

    def held(self, now: float) -> float:
        """Return how long it was held, in seconds."""
        return (self.ended_at if self.ended else now) - self.since

    # Renewal

    def due(self, renewing: bool) -> float:
        """Return when to look at it next: at its next extension, or at its deadline."""
        return min(self._renew_at, self.deadline) if renewing and self._may_extend(self._renew_at) else self.deadline

    def extension(self, now: float) -> Ballot | None:
        """Return the round that extends it, or None when it ended or may not be extended."""
        if not self.check(now):
            return None
        if not self._may_extend(now):
            self._renew_at = float("inf")  # or it would be due again at once, until its end
            return None
        self._renew_at = now + self.ttl / 12
        request = Extend(self._slugs, self.nonce, self._value, self.ttl, self.token, self._rules.fence_keep)
        ballot = Ballot(
            requests=dict.fromkeys(range(self._rules.nodes), request),
            decided=self._decided,
            timeout=min(self._rules.timeout(self.ttl), max(self.deadline - now, 0.001)),
            needed=self._rules.needed,
        )
        self._ballots = [old for old in self._ballots if old.unanswered()] + [ballot]
        return ballot

    def extended(self, ballot: Ballot, start: float, now: float) -> bool:
        """
        Take the outcome of a round that began at *start*; returns whether the lease is longer now.

        A round without a verdict changes nothing: unknown is not lost, and the next one may succeed before the
        deadline.
        """
        for reply in ballot.replies.values():
            if reply.fence:
                self._floor.lift(self._slugs, reply.fence)
        if not self.check(now):
            return False
        if ballot.count(Kind.HELD) >= self._rules.needed:
            self.extensions += 1
            self.deadline = max(self.deadline, self._rules.deadline(start, self.ttl))
            self._renew_at = start + self.ttl / 3
            return True
        if ballot.count(Kind.REFUSED) > self._rules.spare:
            self.end("superseded", now)
        return False

    def release(self, timeout: float) -> Ballot:
        """Return the round that releases it on all nodes; *timeout* 0 does not wait for replies."""
        nodes = range(self._rules.nodes)
        return farewell(self._slugs, self.nonce, nodes, self._ballots, self.ttl, timeout, self._rules.needed)

    def _decided(self, replies: Mapping[int, Reply]) -> bool:
        silent = sum(reply.kind not in ANSWERS for reply in replies.values())
        return (
            count(replies, Kind.HELD) >= self._rules.needed
            or count(replies, Kind.REFUSED) > self._rules.spare
            or silent > self._rules.spare
        )

    def _may_extend(self, when: float) -> bool:
        return not self._used_up() and when - self.since < self._rules.max_hold

    def _used_up(self) -> bool:
        allowed = self._rules.max_extensions
        return allowed is not None and self.extensions >= allowed

    def _reason_of_lapse(self) -> str:
        if self._used_up():
            return "max_extensions"
        return "max_hold" if self.deadline - self.since >= self._rules.max_hold else "expired"


def release_outcome(ballot: Ballot, rules: Rules) -> str:
    """Return what a release found: ``released``, ``expired``, ``taken`` or ``unknown``."""
    if ballot.count(Kind.RELEASED) >= rules.needed:
        return "released"
    if ballot.count(Kind.GONE, Kind.BUSY) > rules.spare:
        return "taken" if ballot.count(Kind.BUSY) else "expired"
    return "unknown"
