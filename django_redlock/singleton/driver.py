"""
Carries out on the lock nodes what the decisions about slots ask (internal).
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import ceil, inf
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from ..core.acquisition import GaveUp
from ..core.attempt import Granted
from ..core.names import Owner, decode, permit_slug, slug
from ..core.protocol import SUPERSEDED, Extend, Outcome, Term
from ..core.rules import MIN_TTL, QueuePlace, Wanted
from ..core.votes import extended_by_quorum, is_quorum
from ..engine.lease import Lease, note_late_loss, passed_on, release_at_end, resume_renewal, stop_renewal
from ..engine.manager import LockManager, fresh_secret, owner_here
from ..exceptions import LockTakenError, QuorumUnavailableError, printable
from ..handler import locks
from ..inventory.survey import Poll, ask_nodes, tell_nodes
from ..signals import lock_acquired, lock_taken
from . import questions as ask
from .line import Expected, Lengths, write_length
from .slot import CLAIM, FREE, Holder, Seen, SlotState
from .ticket import Permit, Ticket

TURN = 5.0  # seconds for which a process that was killed in its turn delays the others

T = TypeVar("T")
log = logging.getLogger("django_redlock")

_lengths: WeakKeyDictionary[LockManager, Lengths] = WeakKeyDictionary()


class Claimed(NamedTuple):
    """
    The slot of a message that is about to be sent.

    Args:
        owner: The description of the claim.
        granted: The won lock.
    """

    owner: Owner
    granted: Granted


class Nodes:
    """
    Answers the questions of a decision about the slots of one task.

    Args:
        using: Alias in ``REDLOCK``.
        label: The task's name.
        times: How long the slot of a run lasts without renewal, and with it.
    """

    answers: ClassVar[dict[type[ask.Question], Callable[[Any, Any], Any]]]

    def __init__(self, using: str, label: str, times: Mapping[str, Any] | None = None) -> None:
        self.manager: LockManager = locks[using]
        self.label = label
        self.times: Any = times or {}

    def run(self, decision: ask.Steps[T]) -> T:
        """Carry out a decision; return its answer, or raise what it does not handle."""
        answer: Any = None
        error: BaseException | None = None
        try:
            while True:
                question = decision.send(answer) if error is None else decision.throw(error)
                answer = error = None
                try:
                    answer = self.answers[type(question)](self, question)
                except BaseException as raised:
                    error = raised
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            error = None  # its traceback refers to this frame

    # About time

    def now(self, question: ask.Now) -> float:
        """Return the time on the clock of the locks."""
        return self.manager.runtime.clock()

    def wall(self, question: ask.Wall) -> float:
        """Return the date and time."""
        return self.manager.runtime.wall()

    def sleep(self, question: ask.Sleep) -> None:
        """Wait."""
        runtime = self.manager.runtime
        runtime.sleep(question.seconds * (0.5 + runtime.random()))

    # Locks of waiting messages, and notes

    def look(self, question: ask.Look) -> tuple[Seen, ...]:
        """Ask the nodes for the holders of several locks, in one round trip."""
        if not question.names:  # of a message whose run has no slot
            return ()
        slugs = tuple(map(slug_of, question.names))
        poll = ask_nodes(self.manager, slugs)
        poll.require_quorum(str(question.names[0]))
        return tuple(seen_in(poll, slug) for slug in slugs)

    def claim(self, question: ask.Claim) -> Claimed | Holder:
        """Claim the lock of a waiting message, in one round trip."""
        manager, ticket = self.manager, question.ticket
        ttl, state = max(MIN_TTL, min(CLAIM, question.ttl)), SlotState.CLAIMED
        owner = owner_here("task", self.label, ticket.task_id, ttl=ttl, state=state, call=question.call)
        wanted = Wanted.left_alone(ticket.waiting, owner, ticket.secret, adopt=question.adopt)
        wanted = wanted._replace(barge=True) if question.barge else wanted
        outcome = manager.acquirer.run(wanted)
        # Signals are sent only to those who receive them: their arguments take time.
        if isinstance(outcome, Granted):
            if lock_acquired.receivers:
                manager.acquirer.held(wanted, outcome, renew=False)
            return Claimed(wanted.owner, outcome)
        if outcome.agreed and not lock_taken.receivers:
            return Holder.described(decode(outcome.holder), outcome.retry_after)
        try:
            manager.acquirer.held(wanted, outcome, renew=False)  # raises
        except LockTakenError as taken:
            return Holder.of(taken)
        raise AssertionError("an attempt that gave up has an error")

    def confirm(self, claim: Claimed, ttl: float) -> None:
        """Keep a claimed slot for *ttl* seconds, because its message was sent; this happens in the background."""
        # A node on which the claim has lapsed, or that did not get it, gets the slot as well, unless it knows of a
        # later holder or of a release.
        self.manager.confirmations.add(claim.granted, claim.owner, SlotState.QUEUED, ttl)

    def put(self, question: ask.Put) -> str:
        """Take a lock that is not renewed, and return its secret."""
        manager, secret = self.manager, question.secret or fresh_secret()
        label, ttl = question.label or self.label, max(MIN_TTL, question.ttl)
        owner = owner_here("task", label, question.ref, ttl=ttl, state=question.state, call=question.call)
        how: Any = {"adopt": question.adopt, "strict": question.strict, "limit": question.limit}
        name, permit = question.name if isinstance(question.name, Permit) else (question.name, 0)
        wanted = Wanted.left_alone(name, owner, secret, permit=permit, **how)
        outcome = manager.acquirer.run(wanted)
        # A lock that is not renewed needs a lease only as the signal's argument.
        if isinstance(outcome, GaveUp) or lock_acquired.receivers:
            manager.acquirer.held(wanted, outcome, renew=False)
        return secret

    def free(self, question: ask.Free) -> Outcome:
        """Free a lock, without ever raising."""
        return free(self.manager.alias, question.name, question.secret, revoke=question.revoke)

    def write_back(self, question: ask.WriteBack) -> bool:
        """
        Write a value to all nodes; return whether a quorum has it now.

        A node refuses if it knows of a later holder or of a release. The value keeps its secret.

        Raises:
            QuorumUnavailableError: Too few nodes answered.
        """
        manager, name, seen = self.manager, question.name, question.seen
        term = Term((slug(name),), seen.secret, seen.value, max(MIN_TTL, seen.left), seen.fence)
        replies = tell_nodes(manager, Extend((term,), manager.rules.fence_keep)).replies
        kinds = [reply.terms[0].kind for reply in replies.values() if reply.terms]
        if extended_by_quorum(kinds, manager.rules):
            return True
        if not is_quorum(len(kinds), manager.rules.needed):
            nodes = {manager.nodes[node].name: str(reply) for node, reply in replies.items()}
            raise QuorumUnavailableError(name, nodes=nodes, needed=manager.rules.needed)
        return False

    def in_turn(self, question: ask.InTurn) -> Any:
        """Carry out a decision in the turn of its key."""
        with turn(self.manager, question.ticket.turn, question.longest):
            return self.run(question.decision)

    def waiter_of(self, ticket: Ticket) -> str:
        """Return the name of a message in the queue of its slot."""
        return ticket.waiter

    def leave_line(self, question: ask.LeaveLine) -> None:
        """Give up the place of a message in the queue of its slot."""
        leave_line(question.ticket, self.waiter_of(question.ticket))

    # The slot of a run

    def take(self, question: ask.Take) -> Lease:
        """Take the slot for a run."""
        ticket = question.ticket
        length = self.lengths.measured(ticket.running, self.manager.runtime.clock()) if question.away else 0.0
        ref = "" if question.inline else ticket.task_id
        owner = owner_here("task", self.label, ref, call=write_length(length))
        how: dict[str, Any] = {"limit": ticket.limit, "secret": question.secret, "wait": question.wait, "renew": True}
        how |= {"adopt": ticket.secret if ticket.waiting == ticket.running else "", "barge": question.barge}
        if question.away:
            # In whole seconds: requests have few different values then, and the words of each are kept.
            how["place"] = QueuePlace(self.waiter_of(ticket), ticket.stamp, float(ceil(question.away)))
        return self.manager.on_behalf(ticket.running, owner, **self.times, **how).acquire()

    def hand_over(self, question: ask.HandOver) -> Claimed:
        """Give the slot of a run to a waiting message."""
        lease: Any = question.slot
        stop_renewal(lease)  # otherwise, an extension in progress would report the slot as lost
        try:
            found = self.claim(ask.Claim(question.ticket, question.ttl, lease.secret))
            if isinstance(found, Holder):
                raise LockTakenError(question.ticket.waiting)
        except BaseException:
            resume_renewal(lease)
            raise
        passed_on(lease)
        return found

    @property
    def lengths(self) -> Lengths:
        """The lengths of runs that this process knows."""
        return _lengths.setdefault(self.manager, Lengths())

    def length(self, question: ask.Length) -> Expected:
        """Return how long runs under a lock take."""
        return self.lengths.expected(question.name, question.told, question.since, self.manager.runtime.clock())

    def note_length(self, question: ask.NoteLength) -> None:
        """Note how long a run took."""
        self.lengths.measure(question.name, question.seconds, self.manager.runtime.clock())

    def free_slot(self, question: ask.FreeSlot) -> Outcome:
        """Free the slot of a run, or leave it taken for a while, and report it if it was lost."""
        lease: Any = question.slot
        if question.hold:
            lease.hold.keep_for(question.hold)
        outcome = Outcome(lease.release() if question.wait else release_at_end(lease))
        note_late_loss(lease, outcome)
        return outcome


Nodes.answers = {
    ask.Now: Nodes.now,
    ask.Wall: Nodes.wall,
    ask.Sleep: Nodes.sleep,
    ask.Look: Nodes.look,
    ask.Claim: Nodes.claim,
    ask.Put: Nodes.put,
    ask.Free: Nodes.free,
    ask.WriteBack: Nodes.write_back,
    ask.InTurn: Nodes.in_turn,
    ask.LeaveLine: Nodes.leave_line,
    ask.Take: Nodes.take,
    ask.Length: Nodes.length,
    ask.NoteLength: Nodes.note_length,
    ask.HandOver: Nodes.hand_over,
    ask.FreeSlot: Nodes.free_slot,
}


def slug_of(lock: str | Permit) -> str:
    """Return a lock, or one of its permits, as written in the keys."""
    return permit_slug(slug(lock.name), lock.number) if isinstance(lock, Permit) else slug(lock)


def free(using: str, name: str | Permit, secret: str, *, revoke: bool = False) -> Outcome:
    """
    Free a lock that is held with *secret*; return what :meth:`LockManager.release` returns.

    It never raises, because it is called while another error is handled. Without a name or secret it returns
    ``unknown``. With *revoke*, the holder learns that an operator took the lock away.
    """
    if not secret or not name:
        return Outcome.UNKNOWN
    try:
        # The claim of the lock, or its confirmation, may still be on its way to a node.
        queue = slug(name.name) if isinstance(name, Permit) else ""
        return locks[using].release_slugs((slug_of(name),), secret, SUPERSEDED, queue=queue, revoke=revoke)
    except Exception:
        log.exception("the slot %s could not be freed; it ends with its time", printable(str(name)))
        return Outcome.UNKNOWN


def give_up(ticket: Ticket) -> None:
    """Free the slot of a message that ends without a decision, and give up its place in the queue; it never raises."""
    free(ticket.using, ticket.waiting, ticket.secret)
    if ticket.stamp:
        leave_line(ticket, ticket.waiter)


def leave_line(ticket: Ticket, waiter: str) -> None:
    """Give up a place in the queue of a slot; it never raises."""
    try:
        locks[ticket.using].leave_queue(ticket.running, waiter)
    except Exception:
        log.exception("the place of task %s in the queue could not be given up", printable(ticket.task_id))


@contextmanager
def turn(manager: LockManager, name: str, longest: float) -> Iterator[Lease]:
    """
    Run a block during which no other process changes the pending call of a key.

    Args:
        manager: The locks.
        name: The name of the lock that has the turn.
        longest: Seconds to wait for the turn.

    Raises:
        QuorumUnavailableError: Too few nodes answered, the turn did not come in time, or the record has changed.
    """
    try:
        ttl = manager.rules.check_ttl(TURN)
    except ValueError:
        ttl = manager.rules.ttl
    # Detached, so that no watchdog looks after the lease: a turn ends long before it.
    owner = owner_here("task", "turn")
    lock = manager.on_behalf(name, owner, ttl=ttl, wait=longest, renew=False, detached=True)
    try:
        lease = lock.acquire()
        try:
            yield lease
        finally:
            lease.release(wait=False)  # no caller depends on when it arrives
    except LockTakenError as error:  # the same to the caller: it is unknown whether its change was made
        raise QuorumUnavailableError(
            error.name, error.waited, error.attempts, error.nodes, manager.rules.needed
        ) from error


def seen_in(poll: Poll, slug: str) -> Seen:
    """Return what a survey shows about the key of one lock."""
    tally = poll.tally(slug, by=str)  # a quorum must agree on the state, too
    if tally.is_free or (tally.winner and not tally.winner.value):
        return FREE
    nodes, needed = poll.manager.nodes, poll.manager.rules.needed
    found: list[Seen] = []
    reported: dict[str, str] = {
        node.name: poll.silent.get(index, str(SlotState.FREE)) for index, node in enumerate(nodes)
    }
    for vote in tally.votes:
        if vote.value:  # a key that is empty or not a string names no holder
            left, fence = min(vote.lefts), min(row.fence for row in vote.rows.values())
            seen = Seen(vote.value, left if left < inf else 0.0, vote.nodes, fence, reported=reported, needed=needed)
            reported |= {nodes[index].name: str(seen.holder) for index in vote.rows}
            found.append(seen)
    if tally.winner:
        return found[0]
    # Of the two states of one hold, the later one lasts longer: a message that was sent, than one that may be.
    split = tuple(sorted(found, key=lambda seen: (-seen.fence, -seen.left)))
    return Seen("", 0.0, 0, split=split, reported=reported, needed=needed)
