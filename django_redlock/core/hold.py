"""
One held lock: its deadline, its extensions, its end (internal).

An extension must *complete* before the deadline it extends, and the new deadline counts from the *start* of its
round. A lease that lapsed is never revived, even if all its keys are still there. The number of extensions and
the time of holding are bounded, as "Distributed Locks with Redis" asks ("Making the algorithm more reliable:
Extending the lock").
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from .attempt import Granted, HighestToken
from .names import HELD, common_value, counted, decode, encode
from .protocol import NOBODYS, REFUSALS, STOPPED, EndReason, Extended, Kind, Outcome, Release, Reply, Term
from .round import Round, unanswered
from .rules import EXPIRY_ROUNDING, Rules, Wanted
from .votes import Verdict, extended_by_quorum, prevents_quorum

BATCH = 100  # most leases in one round; a script over more would block its node for a millisecond
BATCH_NAMES = 200  # most names in one round
_numbers = itertools.count()  # of terms


class HoldState:
    """
    One held lock, from grant to end.

    Args:
        wanted: The lock that was requested.
        granted: The won acquisition.
        rules: The options of the alias.
        highest: The highest tokens seen in this process.
    """

    __slots__ = (
        *("names", "ttl", "shared", "limit", "secret", "fencing_token", "waited", "since", "deadline", "timeout"),
        *("hold_until", "keeps", "extensions", "ended", "successor", "_taken_away", "_ended_at", "_rules", "_highest"),
        *("_slugs", "_value", "_leaving", "_queue", "_untouched", "_rounds", "_granting"),
        *("_renew_at", "_max_hold", "_max_extensions", "_heartbeat", "_beat", "_preparing", "_shortening"),
    )

    def __init__(self, wanted: Wanted, granted: Granted, rules: Rules, highest: HighestToken) -> None:
        self.names = wanted.names
        self.ttl = wanted.ttl
        self.shared = wanted.shared
        self.limit = wanted.limit
        self.secret = granted.secret
        self.fencing_token = granted.fencing_token
        self.waited = granted.waited
        self.since = granted.start
        self.deadline = granted.deadline
        self.timeout = granted.timeout
        self.hold_until = granted.hold_until
        self.keeps = granted.hold_until > 0  # whether the end of the work leaves the lock taken until then
        self.extensions = 0
        self.ended: EndReason | None = None
        self.successor = ""  # who got the lock afterwards, described as JSON; empty if nobody is known
        self._taken_away = False
        self._ended_at = 0.0
        self._rules = rules
        self._highest = highest
        self._slugs = granted.slugs
        self._value = granted.value
        self._leaving = granted.leaving
        self._queue = granted.queue
        self._untouched = granted.untouched
        # The rounds whose requests may still reach a node, so that a release to that node has to leave a tombstone.
        self._rounds: list[Round] = list(granted.rounds)
        # If the caller chose the secret, a later hold may have the same one; these rounds distinguish the two.
        self._granting = granted.rounds if wanted.secret and not wanted.shared else None
        # What bounds the extensions
        self._renew_at = granted.start + self.ttl / 3
        self._max_hold = rules.max_hold if wanted.max_hold is None else wanted.max_hold
        self._max_extensions = float("inf") if rules.max_extensions is None else rules.max_extensions
        self._heartbeat = wanted.heartbeat
        self._beat = granted.start
        # Extensions that are on their way
        self._preparing: set[int] = set()  # about to be sent
        self._shortening: list[Round] = []  # asked for less time and still lack replies

    # Validity, by the clock alone

    def remaining(self, now: float) -> float:
        """Return the seconds of validity left; 0 once the hold has ended."""
        return 0.0 if self.ended else max(0.0, self.deadline - now)

    def end(self, reason: EndReason, now: float) -> bool:
        """End the hold for good, and return whether this call ended it; the first reason stays."""
        if self.ended:
            return False
        self.ended, self._ended_at = reason, now
        return True

    def check(self, now: float) -> bool:
        """Return whether the hold is still valid; end it if its deadline has passed."""
        if not self.ended and now >= self.deadline:
            self.end(self._reason_of_lapse(), now)
        return not self.ended

    def held(self, now: float) -> float:
        """Return the seconds for which the lock has been held, or was held until the hold ended."""
        return (self._ended_at if self.ended else now) - self.since

    def beat(self, now: float) -> None:
        """Note a sign of life from the work, for a lease with ``heartbeat=``."""
        self._beat = now

    # Used by the fence in a database

    def fenced_out(self, fencing_token: int, now: float) -> None:
        """End the hold, because a database has seen a later holder's *fencing_token*; the next proposal is higher."""
        self._highest.lift(self._slugs, fencing_token)
        self.end(EndReason.FENCED, now)

    def permit(self) -> str:
        """Return the number of the permit that is held, as text; empty unless the lock has a ``limit``."""
        return self._slugs[0].rpartition("#")[2] if self._queue else ""

    # Renewal

    def next_event(self, renewing: bool) -> float:
        """Return when a renewed hold is next extended, otherwise the deadline; infinity once the hold has ended."""
        if self.ended:
            return float("inf")
        return min(self._renew_at, self.deadline) if renewing and self._may_extend(self._renew_at) else self.deadline

    def term(self, now: float, ttl: float | None = None) -> Term | None:
        """
        Return the term that extends the hold in a round; None if the hold has ended or may not be extended.

        Args:
            now: The time, in seconds on the client's steady clock.
            ttl: Length of the lease from now on, in seconds; None keeps the present length.
        """
        # Noted before the check whether the hold ended: see release(). Otherwise a release in another thread could find
        # nothing on its way, leave no tombstone, and be overtaken by this extension, which restores a released lock.
        number = next(_numbers)
        self._preparing.add(number)
        self._untouched = frozenset()  # an extension gives the lock to a node that lacks it
        if not self.check(now) or not self._may_extend(now) or self._silent(now):
            self._preparing.discard(number)
            # Without a later time, the hold would be due again at once, until its end. Its work may still send a
            # heartbeat.
            self._renew_at = now + self.ttl / 12 if self._may_extend(now) else float("inf")
            return None
        shorten = ttl is not None and now + ttl < self.deadline
        if ttl is not None:
            self.ttl, self.timeout = ttl, self._rules.timeout(ttl, len(self._slugs))
            # The earlier deadline counts from now on, because a node may execute the request at any moment.
            self.deadline = min(self.deadline, self._rules.deadline(now, ttl))
        self._renew_at = now + self.ttl / 12
        # A node that has lost the lock gets it back for the whole minimum hold.
        lasting = max(self.ttl, self.hold_until - now) if self.hold_until else self.ttl
        value = counted(self._value, self.extensions + 1)
        token, common = self.fencing_token, common_value(self.limit) if self._queue else ""
        return Term(self._slugs, self.secret, value, lasting, token, self.shared, shorten, number, common)

    def asked(self, round: Round, term: Term) -> None:
        """Note the round that asks for an extension, before it is sent."""
        for known in (self._rounds, self._shortening):
            for old in list(known):
                if not old.unanswered():
                    with suppress(ValueError):  # another thread was quicker
                        known.remove(old)
        self._rounds.append(round)
        if term.shorten:
            self._shortening.append(round)
        self._preparing.discard(term.number)

    def extended(self, round: Round, number: int, start: float, now: float) -> bool:
        """
        Apply the outcome of a round, and return whether the lease is longer now.

        A round without a quorum changes nothing: the lease is not lost, and the next round may succeed before the
        deadline.

        Args:
            round: The round.
            number: The index of this lease in the round.
            start: When the round began, in seconds on the client's steady clock.
            now: The present time, on the same clock.
        """
        terms = round.terms
        ttl = terms[number].ttl
        if self.hold_until:
            ttl = min(ttl, self.ttl)  # the nodes keep the lock for longer than the lease lasts
        # A request to shorten the lease may still be on its way; a node may execute it after this extension.
        unsure = {node for old in self._shortening if old is not round for node in old.unanswered()}
        reported = {
            node: reply.terms[number]
            for node, reply in round.replies.items()
            if len(reply.terms) == len(terms) and node not in unsure
        }
        self._highest.lift(self._slugs, max((term.fence for term in reported.values()), default=0))
        if not self.check(now):
            return False
        longer = extended_by_quorum([term.kind for term in reported.values()], self._rules)
        if longer:
            if ttl != self.ttl:  # another extension has set another length since, and that one counts
                return False
            self.extensions += 1
            # From the start of the round, as for a new lock: the nodes count from a later moment. Two extensions may be
            # answered in another order than they were sent, so the later deadline stays.
            self.deadline = max(self.deadline, self._rules.deadline(start, ttl))
            self._renew_at = start + ttl / 3
            return True
        refused = {node: term for node, term in reported.items() if term.kind in REFUSALS}
        if longer is False and self.end(self._reason_of_refusal(refused.values()), now):
            self.note_successor({node: Reply(Kind.BUSY, detail=term.holder) for node, term in refused.items()})
        return False

    def release(self, timeout: float) -> Round:
        """
        Return the round that releases the lock on all nodes that may have it; with *timeout* 0 it is *unattended*.

        Another thread may be about to send an extension. That thread notes the extension before it checks whether the
        hold has ended, and this method is called after the end. So either the thread sends no extension, or its
        extension finds a tombstone on every node.
        """
        nodes = set(range(self._rules.nodes)) - self._untouched
        lasting = max(self.ttl, self.hold_until - self._ended_at) if self.hold_until else self.ttl
        unsure = nodes if self._preparing else unanswered(self._rounds)
        release = Release(self._slugs, self.secret, 0.0, self._leaving, self.shared, self._queue)
        return Round.to_release(
            release,
            nodes,
            timeout,
            self._rules.needed,
            unsure=unsure,
            tombstone=self.ttl,
            lasting=lasting,
            granting=self._granting,
            number=self.fencing_token,
            unattended=not timeout,
        )

    def holds_on(self, now: float) -> bool:
        """Return whether the minimum hold has not passed yet."""
        return now + EXPIRY_ROUNDING < self.hold_until

    def keep(self, now: float, timeout: float, again: bool = False) -> Round:
        """
        Return the round that leaves the lock taken for the rest of its minimum hold, by nobody's process.

        A node that misses it, or that gets an extension of the lease after it, keeps the lock for up to one ttl longer.
        Nothing is redelivered: that would only lengthen the hold. A round that is sent *again* only changes what the
        nodes still have, under each name by itself.
        """
        rest = self.hold_until - now
        # The nodes have counted the minimum hold from its beginning. Their key ends later only if the last extension
        # lasts longer. Then the hold ends by this client's clock, which may run faster than theirs.
        shorten = rest < self.ttl
        left = min(self.ttl, rest + self._rules.drift(now - self.since)) if shorten else rest
        owner = decode(self._value)
        value = self._value
        if owner and not self.shared:  # the value of a shared lock describes all of its holders
            held = round(self.hold_until - self.since, 3)
            value = encode(self.secret, owner._replace(state=HELD, ttl=round(left, 3), process="", hold=held))
        # A lease that was lost is never restored, but where nobody else has the lock since, its hold goes on.
        token = self.fencing_token if self.ended is EndReason.RELEASED and not again else -1
        common = common_value(self.limit) if self._queue else ""
        about = (self.secret, value, left, token, self.shared, shorten, next(_numbers), common, True)
        alone = [(slug,) for slug in self._slugs] if again and len(self._slugs) <= BATCH else [self._slugs]
        return Round.to_keep(tuple([Term(slugs, *about) for slugs in alone]), self._rules, timeout)

    def leave_queue(self) -> Round | None:
        """
        Return the round that takes a holder that had waited out of the queue, if it did; :meth:`keep` does not.

        For a moment, the nodes reserve the lock for it. Without this, the next waiter would get a short hold too late.
        """
        if not self._leaving:
            return None
        release = Release(self._slugs, NOBODYS, 0.0, self._leaving, queue=self._queue)
        return Round.to_release(release, range(self._rules.nodes), 0.0)

    def release_came_too_late(self, outcome: Outcome) -> None:
        """Correct the reason ``released``: by the *outcome* of the release, the nodes had lost the lock before."""
        if self.ended is EndReason.RELEASED:
            unknown = EndReason.REVOKED if self._taken_away else EndReason.FORGOTTEN
            self.ended = EndReason.SUPERSEDED if outcome is Outcome.TAKEN else unknown

    def note_operator(self, replies: Mapping[int, Reply]) -> None:
        """Note whether an operator took the lock away, as *replies* say to a release that came too late."""
        self._taken_away = any(reply.detail == STOPPED for reply in replies.values())

    def note_successor(self, replies: Mapping[int, Reply]) -> None:
        """Note who has the lock now, if a quorum of the *replies* that refused a request names the same holder."""
        verdict = Verdict(replies, self._rules)
        if verdict.agreed:
            self.successor = verdict.holder

    def _may_extend(self, when: float) -> bool:
        return self.extensions < self._max_extensions and when - self.since < self._max_hold

    def _silent(self, when: float) -> bool:
        return self._heartbeat is not None and when - self._beat >= self._heartbeat

    def _reason_of_lapse(self) -> EndReason:
        if self.extensions >= self._max_extensions:
            return EndReason.MAX_EXTENSIONS
        if self._silent(self.deadline):
            return EndReason.HEARTBEAT
        return EndReason.MAX_HOLD if self.deadline - self.since >= self._max_hold else EndReason.EXPIRED

    def _reason_of_refusal(self, refused: Collection[Extended]) -> EndReason:
        """
        Return the reason that the refusals prove.

        If more nodes than a quorum can spare have a later token, another caller has come since, and may or may not have
        got the lock. Without such tokens the nodes have lost their data, or somebody removed the keys.
        """
        if any(term.kind is Kind.REVOKED for term in refused):
            return EndReason.REVOKED
        later = sum(term.fence > self.fencing_token for term in refused)
        return EndReason.SUPERSEDED if prevents_quorum(later, self._rules) else EndReason.FORGOTTEN


def batches(terms: Sequence[Term]) -> list[list[int]]:
    """Return which leases to extend together, by their indexes in *terms*."""
    found: list[list[int]] = []
    names = BATCH_NAMES
    for number, term in enumerate(terms):
        names += len(term.slugs)
        if names > BATCH_NAMES or len(found[-1]) == BATCH:
            found.append([])
            names = len(term.slugs)
        found[-1].append(number)
    return found
