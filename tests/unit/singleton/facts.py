"""What decisions about slots ask, answered from facts: no node, no broker, no clock."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from django_redlock.core.names import SECRET_SIZE, Owner, encode
from django_redlock.core.protocol import Outcome
from django_redlock.exceptions import LockLostError, LockTakenError, QuorumUnavailableError
from django_redlock.singleton import questions as ask
from django_redlock.singleton.line import GRACE, Expected
from django_redlock.singleton.options import SingletonOptions
from django_redlock.singleton.questions import Result, ResultState
from django_redlock.singleton.slot import FREE, Holder, Seen, SlotState
from django_redlock.singleton.ticket import Ticket

ENDLESS = 200  # questions after which a decision is taken for one that never ends


def secret(letter: str) -> str:
    """Return a secret."""
    return letter * SECRET_SIZE


def held(
    task_id: str,
    state: str = "",
    *,
    secret: str,
    call: str = "",
    kind: Any = "task",
    left: float = 20.0,
    task: str = "shop.sync",
) -> Seen:
    """Return what all nodes say about a lock that a task has."""
    owner = Owner("host", 1, kind, task, task_id, 1.0, 30.0, state=state, call=call)
    return Seen(encode(secret, owner), left, 3)


@dataclass(eq=False)
class FakeSlot:
    """The slot of a run."""

    name: str
    secret: str
    lost: bool = False

    def valid(self) -> bool:
        return not self.lost

    def ensure(self) -> None:
        if self.lost:
            raise LockLostError(self.name)


@dataclass
class Facts:
    """
    Answers questions.

    Args:
        locks: The locks that are held.
        results: The results that are stored, by the id of the task.
        silent: The questions to which the nodes do not answer.
        silent_for: For how long, if they say so.
        refuses: How whoever carries messages refuses them.
        cannot_store: Whether no outcome can be stored.
        lost: Whether the slot of the run is lost right after it was taken.
        length: How long the last run took; 0.0 is not known.
        ahead: How many waiters come before the message in the queue of its slot; None if it is in none.
        first: How many waiters come before it while the slot is free, at one attempt after the other.
        kept: For how long the worker has had the message.
        here: The row that this thread has stored.
        unheard: Whether no node hears that a lock is freed, or written.
        ends_soon: Whether the run that has the slot ends while somebody waits for it in a process.
        ends_late: Whether it ends just before the message would be put back.
        meanwhile: The locks that others take before this one claims a lock.
    """

    locks: dict[str, Seen] = field(default_factory=dict)
    results: Mapping[str, Result] = field(default_factory=dict)
    silent: tuple[type[ask.Question], ...] = ()
    silent_for: float | None = None
    refuses: ask.NotSent | None = None
    cannot_store: bool = False
    lost: bool = False
    length: float = 0.0
    ahead: int | None = 0
    first: tuple[int | None, ...] = ()
    kept: float | None = 0.0
    here: str = ""
    unheard: bool = False
    ends_soon: bool = False
    ends_late: bool = False
    meanwhile: dict[str, Seen] = field(default_factory=dict)
    asked: list[ask.Question] = field(default_factory=list)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.locks = dict(self.locks)  # a decision changes them, and a case is played more than once

    def decide(self, decision: ask.Steps[Any]) -> Any:
        """Return what is decided under these facts."""
        steps = self.steps(decision)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                return stop.value

    def steps(self, decision: ask.Steps[Any]) -> Generator[None, None, Any]:
        """Decide as far as the next question at each step; the facts answer at the step after that."""
        answer: Any = None
        error: Exception | None = None
        while True:
            try:
                question = decision.throw(error) if error else decision.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = error = None
            yield
            try:
                answer = self.answer(question)
            except (LockTakenError, QuorumUnavailableError) as raised:
                error = raised

    def asked_for(self, kind: type[ask.Question]) -> list[Any]:
        """Return the questions of one kind, in the order in which they were asked."""
        return [question for question in self.asked if isinstance(question, kind)]

    def answer(self, question: ask.Question) -> Any:
        self.asked.append(question)
        assert len(self.asked) < ENDLESS
        if isinstance(question, self.silent):
            raise QuorumUnavailableError("silent", retry_after=self.silent_for)
        match question:
            case ask.Now() | ask.Wall():
                return self.now
            case ask.Sleep(seconds):
                self.now += seconds
            case ask.Look(names):
                return tuple(self.locks.get(name, FREE) for name in names)
            case ask.Claim(barge=False) if self.first:
                return Holder(None, SlotState.CLAIMED, None)
            case ask.Claim(ticket, _, adopt, call):
                self.locks |= self.meanwhile
                return self._claim(ticket, adopt, call)
            case ask.Put(name, _, state, own, ref, adopt, strict, call):
                return self._put(name, str(state), own or secret(str(len(self.asked) % 10)), ref, adopt, strict, call)
            case ask.Take(barge=False) if self.first:
                ahead, self.first = self.first[0], self.first[1:] or self.first
                raise LockTakenError("free", queued=True, ahead=ahead)
            case ask.Take(ticket, own, inline, wait, away):
                if (wait and self.ends_soon) or (away > GRACE and self.ends_late):
                    del self.locks[ticket.running]
                adopt = ticket.secret if ticket.waiting == ticket.running else ""
                ref, ahead = "" if inline else ticket.task_id, self.ahead if away else None  # it is in no queue
                self._put(ticket.running, "", own or secret("e"), ref, adopt, False, "", ahead)
                return FakeSlot(ticket.running, own or secret("e"), self.lost)
            case ask.Free(name, own):
                return self._free(name, own)
            case ask.FreeSlot(slot, _, hold):
                seen = self.locks.get(slot.name, FREE)
                if not hold or seen.secret != slot.secret:
                    return self._free(slot.name, slot.secret)
                self.locks[slot.name] = held(seen.holder.task_id or "", "held", secret=slot.secret)
            case ask.HandOver(slot, ticket):
                self._put(ticket.waiting, "claimed", ticket.secret, ticket.task_id, slot.secret, True, "")
                return "claim"
            case ask.InTurn(_, decision):
                try:
                    return self.decide(decision)
                except LockTakenError as taken:
                    raise QuorumUnavailableError(taken.name) from taken
            case ask.ResultOf(task_id):
                return self.results.get(task_id, Result(ResultState.ABSENT))
            case ask.StoreOutcome() if self.cannot_store:
                return OSError("full")
            case ask.Send() if self.refuses:
                return self.refuses
            case ask.Length(_, told):
                return Expected(min(filter(None, (self.length, told)), default=0.0), sure=True)
            case ask.Kept():
                return self.kept
            case ask.Digest():
                return "0123456789"
            case ask.StoredHere():
                return self.here
            case ask.WriteBack() if self.unheard:
                return False
            case ask.WriteBack(name, seen) if any(each.secret == seen.secret for each in self.asked_for(ask.Free)):
                return False  # the nodes know of its release
            case ask.WriteBack(name, seen):
                self.locks[name] = replace(seen, nodes=3)
                return True
        return None

    def _claim(self, ticket: Any, adopt: str, call: str) -> Any:
        try:
            self._put(ticket.waiting, "claimed", ticket.secret, ticket.task_id, adopt, False, call)
        except LockTakenError as taken:
            return Holder.of(taken)
        return "claim"

    def _put(
        self, name: str, state: str, own: str, ref: str, adopt: str, strict: bool, call: str, ahead: int | None = None
    ) -> str:
        seen = self.locks.get(name, FREE)
        if seen.split:
            raise QuorumUnavailableError(name)
        mine = bool(seen.value) and seen.secret in (adopt, own)
        if (seen.value and not mine) or (strict and not mine):
            about = seen.owner._asdict() if seen.owner else {}
            raise LockTakenError(name, holder=about, retry_after=seen.left, ahead=ahead)
        self.locks[name] = held(ref, state, secret=own, call=call)
        return own

    def _free(self, name: str, own: str) -> Outcome:
        seen = self.locks.get(name, FREE)
        if self.unheard:
            return Outcome.UNKNOWN
        if own and seen.value and seen.secret == own:
            del self.locks[name]
            return Outcome.RELEASED
        if seen.split:
            rest = tuple(each for each in seen.split if each.secret != own)
            self.locks[name] = replace(seen, split=rest)
            if not rest:
                del self.locks[name]
            return Outcome.RELEASED
        return Outcome.TAKEN if seen.value else Outcome.EXPIRED


RUNNING, QUEUED, CLAIMED, HELD = "", *(str(state) for state in (SlotState.QUEUED, SlotState.CLAIMED, SlotState.HELD))
NAME, NEXT, OWN, RUN = "task:shop.sync:shop_id=7", "next:task:shop.sync:shop_id=7", secret("a"), secret("e")
TICKET = Ticket(NAME, "default", "mine", OWN)
SERIAL, QUEUE, BOTH = (
    {"scope": scope} for scope in ("while_executing", "until_executing", "until_and_while_executing")
)


def by(task_id: str, state: str = RUNNING, *, name: str = NAME, own: str = "b", **more: Any) -> dict[str, Seen]:
    """Return a lock that a task has."""
    return {name: held(task_id, state, secret=secret(own), **more)}


class Case:
    """
    One situation.

    Args:
        what: In words.
        expected: What is decided about it.
        about: What is not as usual, as ``scene`` takes it.
    """

    def __init__(self, what: str, *expected: Any, **about: Any) -> None:
        self.what, self.expected, self.about = what, expected, about

    def __str__(self) -> str:
        return self.what


def scene(kind: Any, /, **about: Any) -> tuple[Any, Facts]:
    """
    Return a message, a call, a row or a run, and the facts around it.

    Args:
        kind: Its class.
        about: What is not as usual: fields of ``Facts``, of the options, of the class, and of the ticket.
    """
    parts = []
    for owner in (Facts, SingletonOptions, kind):
        names = {each.name for each in fields(owner)}
        parts.append({name: about.pop(name) for name in names & about.keys()})
    facts, options, own = parts
    rules = SingletonOptions(**options)
    scope = {name: getattr(rules, name) for name in ("scope", "limit") if name in options}
    ticket = replace(own.pop("ticket", TICKET), **scope, **about)
    return kind(ticket=ticket, rules=rules, **own), Facts(**facts)
