"""What becomes of a message, decided from facts: no worker, no broker and no node takes part."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from django_redlock.core.names import GOES_ON, NOTE
from django_redlock.singleton.arrival import Answer, Fail, Leave, Message, PutBack, Revoke, Run, arrive, expire
from django_redlock.singleton.options import Return, SingletonOptions
from django_redlock.singleton.questions import Look, Put, Refused, Result, ResultState, Send, Take
from django_redlock.singleton.slot import DuplicateTask
from django_redlock.singleton.ticket import Ticket, began_secret

from .facts import CLAIMED, HELD, QUEUED, RUNNING, Facts, held, secret

NAME, OWN = "task:shop.sync:shop_id=7", secret("a")
TICKET = Ticket(NAME, "default", "mine", OWN)
OTHER = {NAME: held("other", RUNNING, secret=secret("b"))}
OWN_RUN = {NAME: held("mine", RUNNING, secret=secret("c"))}
OWN_SLOT = {NAME: held("mine", QUEUED, secret=OWN)}
DONE = {"done:mine:0": held("mine", NOTE, secret=secret("d"))}
PENDING = replace(TICKET, number=2)
RECORD = {f"next:{NAME}": held("mine", QUEUED, secret=OWN, call="2.0123456789")}
NEWER = {f"next:{NAME}": held("mine", QUEUED, secret=secret("b"), call="3.9876543210")}
BEGAN = {"began:mine": held("mine", NOTE, secret=began_secret(OWN), call="2")}
SUCCESS, FAILURE = Result(ResultState.SUCCESS, "value"), Result(ResultState.FAILURE, ValueError("no"))
SILENT = Result(ResultState.SILENT, OSError("away"))


@dataclass
class Case:
    """
    One situation.

    Args:
        what: In words.
        verdict: What is decided.
        message: What the message has.
        rules: The options of the task.
        facts: All else.
    """

    what: str
    verdict: type
    message: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.what


AGAIN = {"redelivered": True, "late": True}
CASES = [
    Case("a message that is to run without a slot", Run, {"ticket": replace(TICKET, name="")}, facts={"locks": OTHER}),
    Case("a first delivery, whose slot waits for it", Run, facts={"locks": OWN_SLOT}),
    Case("a first delivery of a free key", Run, {"ticket": TICKET.without_slot}),
    Case("a copy while the first delivery runs", PutBack, AGAIN, facts={"locks": OWN_RUN}),
    Case(
        "a copy while the first runs and another copy waits",
        Leave,
        AGAIN,
        facts={"locks": OWN_RUN | {"watch:mine": held("mine", NOTE, secret=secret("d"), left=9.0)}},
    ),
    Case("a copy after it has ended", Leave, AGAIN, facts={"locks": DONE, "results": {"mine": SUCCESS}}),
    Case("a copy after it has ended, without results", Leave, AGAIN | {"stores": False}, facts={"locks": DONE}),
    Case("a copy after it has ended, with its result stored only", Leave, AGAIN, facts={"results": {"mine": SUCCESS}}),
    Case("a copy of work that is done, but has no result yet", PutBack, AGAIN, facts={"locks": DONE}),
    Case("a copy of a run that failed", Run, AGAIN, facts={"results": {"mine": FAILURE}}),
    Case(
        "a copy of an attempt that another message continues",
        Leave,
        AGAIN,
        facts={"locks": {"done:mine:0": held("mine", GOES_ON, secret=secret("d"))}},
    ),
    Case(
        "a message that its worker has kept, and a copy of which has run",
        Leave,
        facts={"kept": 5.0, "locks": DONE, "results": {"mine": SUCCESS}},
    ),
    Case("another run has the slot, and it waits", PutBack, rules={"on_overlap": "wait"}, facts={"locks": OTHER}),
    Case("another run has the slot, and it is dropped", Revoke, facts={"locks": OTHER}),
    Case("another run has the slot, and it follows", PutBack, rules={"on_overlap": "follow"}, facts={"locks": OTHER}),
    Case("another run has the slot, and it fails", Fail, rules={"on_overlap": "fail"}, facts={"locks": OTHER}),
    Case(
        "another run has the slot, and it returns a value",
        Answer,
        rules={"on_overlap": Return(1)},
        facts={"locks": OTHER},
    ),
    Case(
        "another run has the slot, and it has waited for long enough",
        Revoke,
        {"ticket": replace(TICKET, waited=9.0)},
        {"on_overlap": "wait", "wait_for": 9.0},
        {"locks": OTHER},
    ),
    Case(
        "something that is no task has the slot",
        Revoke,
        facts={"locks": {NAME: held("", kind="manual", secret=secret("b"))}},
    ),
    Case("a run that is over holds the slot", Revoke, facts={"locks": {NAME: held("other", HELD, secret=secret("b"))}}),
    Case(
        "another call has claimed the slot, and may never send",
        PutBack,
        rules={"on_overlap": "fail"},
        facts={"locks": {NAME: held("other", CLAIMED, secret=secret("b"))}},
    ),
    Case(
        "runs have no slot, and another message waits",
        Revoke,
        {"ticket": replace(TICKET, scope="until_executing", secret="")},
        {"scope": "until_executing"},
        {"locks": {NAME: held("other", QUEUED, secret=secret("b"))}},
    ),
    Case(
        "runs have no slot, and its own message waits",
        Run,
        {"ticket": replace(TICKET, scope="until_executing")},
        {"scope": "until_executing"},
        {"locks": OWN_SLOT},
    ),
    Case("a retry, whose slot waits for it", Run, {"retries": 1}, facts={"locks": OWN_SLOT}),
    Case("a retry that another run has overtaken", PutBack, {"retries": 1}, {"on_overlap": "fail"}, {"locks": OTHER}),
    Case("a message whose claim has lapsed, and whose key is free", Run),
    Case("a message whose claim has lapsed, and which another run has overtaken", Revoke, facts={"locks": OTHER}),
    Case(
        "a message that has lost its ticket, and finds its own slot",
        Run,
        {"carried": False, "ticket": TICKET.without_slot},
        facts={"locks": OWN_SLOT},
    ),
    Case("the nodes do not answer", PutBack, facts={"silent": (Take, Look)}),
    Case(
        "the nodes do not answer, and it runs anyway",
        Run,
        rules={"on_unavailable": {"run": "run"}},
        facts={"silent": (Take, Look)},
    ),
    Case(
        "the nodes do not answer, and it fails",
        Fail,
        rules={"on_unavailable": {"run": "fail"}},
        facts={"silent": (Take, Look)},
    ),
    Case(
        "the nodes do not answer, and an older message may have run",
        Leave,
        {"ticket": PENDING},
        {"on_unavailable": {"run": "run"}},
        {"silent": (Take, Look), "results": {"mine": SUCCESS}},
    ),
    Case(
        "the nodes fall silent after the slot was taken",
        PutBack,
        {"late": True},
        {"redelivery": "drop"},
        {"silent": (Put,)},
    ),
    Case(
        "the nodes fall silent after the slot was taken, and it runs anyway",
        Run,
        {"late": True},
        {"redelivery": "drop", "on_unavailable": {"run": "run"}},
        {"silent": (Put,)},
    ),
    Case("the slot is lost before the body begins", PutBack, facts={"lost": True}),
    Case(
        "the slot is lost before the body begins, and it fails",
        Fail,
        rules={"on_unavailable": {"run": "fail"}},
        facts={"lost": True},
    ),
    Case("the result backend is away before a first run", Run, facts={"results": {"mine": SILENT}}),
    Case("the result backend is away, and a copy may be done", PutBack, AGAIN, facts={"results": {"mine": SILENT}}),
    Case(
        "the result backend has been away for long, and a copy may be done",
        Run,
        AGAIN | {"ticket": replace(TICKET, tries=10)},
        facts={"results": {"mine": SILENT}},
    ),
    Case(
        "the result backend is away, and a copy is done",
        PutBack,
        AGAIN | {"ticket": replace(TICKET, tries=10)},
        facts={"locks": DONE, "results": {"mine": SILENT}},
    ),
    Case("its outcome cannot be stored", PutBack, facts={"locks": OTHER, "cannot_store": True}),
    Case(
        "an older message of a pending call", Leave, {"ticket": PENDING}, {"on_duplicate": "replace"}, {"locks": NEWER}
    ),
    Case(
        "the message of a pending call that counts",
        Run,
        {"ticket": PENDING},
        {"on_duplicate": "replace"},
        {"locks": RECORD},
    ),
    Case(
        "the message of a pending call, and a run is before it",
        PutBack,
        {"ticket": PENDING},
        {"on_duplicate": "replace"},
        {"locks": RECORD | OTHER},
    ),
    Case(
        "a copy of the message of a pending call, which runs",
        PutBack,
        {"ticket": PENDING},
        {"on_duplicate": "replace"},
        {"locks": BEGAN | OWN_RUN},
    ),
    Case(
        "a copy of the message of a pending call, which has run",
        Leave,
        {"ticket": PENDING},
        {"on_duplicate": "replace"},
        {"locks": BEGAN, "results": {"mine": SUCCESS}},
    ),
    Case(
        "a message that was put back, and whose joined task has succeeded",
        Answer,
        {"ticket": replace(TICKET, joined="other", tries=1)},
        {"on_overlap": "follow"},
        {"results": {"other": SUCCESS}},
    ),
    Case(
        "a message that was put back, and whose joined task has failed",
        Fail,
        {"ticket": replace(TICKET, joined="other", tries=1)},
        {"on_overlap": "follow"},
        {"results": {"other": FAILURE}},
    ),
    Case(
        "a message that was put back, and whose joined task was lost",
        Run,
        {"ticket": replace(TICKET, joined="other", tries=1)},
        {"on_overlap": "follow"},
    ),
    Case(
        "a message that must not run twice, and has begun",
        Revoke,
        AGAIN,
        {"redelivery": "drop"},
        {"locks": {"begun:mine:0": held("mine", NOTE, secret=secret("d"))}},
    ),
    Case(
        "a message that must not run twice, and runs",
        PutBack,
        AGAIN,
        {"redelivery": "drop"},
        {"locks": OWN_RUN | {"begun:mine:0": held("mine", NOTE, secret=secret("d"))}},
    ),
    Case("a message that must not run twice, and has not begun", Run, AGAIN, {"redelivery": "drop"}),
    Case(
        "the broker does not take it back, and delivers it again",
        PutBack,
        {"late": True},
        {"on_overlap": "wait"},
        {"locks": OTHER, "refuses": Refused(OSError("full"), False)},
    ),
    Case(
        "the broker does not take it back, and has forgotten it",
        Fail,
        {},
        {"on_overlap": "wait"},
        {"locks": OTHER, "refuses": Refused(OSError("full"), False)},
    ),
    Case(
        "the broker takes back no copy, and has forgotten it",
        Leave,
        {"redelivered": True},
        facts={"locks": OWN_RUN, "refuses": Refused(OSError("full"), False)},
    ),
    Case(
        "a call that runs where it was made, and another run has the slot",
        Revoke,
        {"inline": True, "ticket": TICKET.without_slot},
        {"on_overlap": "wait"},
        {"locks": OTHER},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verdict(case: Case) -> None:
    """Each situation ends as the pages say, and only a message that runs or is back keeps anything."""
    facts = Facts(**{"locks": {}} | case.facts | {"locks": dict(case.facts.get("locks", {}))})
    message = Message(**{"ticket": TICKET, "rules": SingletonOptions(**case.rules)} | case.message)
    before = {name: seen for name, seen in facts.locks.items() if seen.holder.task_id != "mine"}

    verdict = facts.decide(arrive(message))

    assert type(verdict) is case.verdict
    assert before.items() <= facts.locks.items()
    sent = [question for question in facts.asked_for(Send) if not facts.refuses]
    assert len(sent) == (isinstance(verdict, PutBack) and not verdict.unsent)
    if isinstance(verdict, Run) and verdict.execution.slot:
        assert facts.locks[NAME].secret == verdict.execution.slot.secret
    elif not isinstance(verdict, (Run, PutBack)):
        assert facts.locks.get(NAME, before.get(NAME)) in (before.get(NAME), case.facts.get("locks", {}).get(NAME))


@pytest.mark.parametrize(
    ("ticket", "locks", "how", "expires"),
    [
        (TICKET, OWN_SLOT, "retry", True),
        (TICKET, OWN_RUN, "retry", False),
        (PENDING, RECORD, "retry", True),
        (PENDING, NEWER, "retry", False),
        (TICKET, None, "retry", False),
        (TICKET, None, "run", True),
    ],
    ids=[
        "it waits",
        "a copy of it runs",
        "it counts",
        "a newer one counts",
        "nobody knows",
        "nodes are not waited for",
    ],
)
def test_message_that_expires(ticket: Ticket, locks: Any, how: Any, expires: bool) -> None:
    """Its task ends with it, unless that lives on: in a run of another delivery, or in a newer message."""
    facts = Facts(dict(locks or {}), silent=() if locks else (Look,))

    assert facts.decide(expire(ticket, SingletonOptions(on_unavailable={"run": how}))) is expires


def test_message_that_fails_tells_who_has_the_slot() -> None:
    """The error has the holder's id and state."""
    message = Message(TICKET, SingletonOptions(on_overlap="fail"))

    verdict = Facts(dict(OTHER)).decide(arrive(message))

    assert isinstance(verdict.error, DuplicateTask)
    assert (verdict.error.holder_id, verdict.error.state) == ("other", "running")
