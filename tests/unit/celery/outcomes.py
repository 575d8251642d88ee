"""
What happens to a message of a singleton task, and to a call of one, as data: facts, and the outcome.

Each situation stands under the first cell of a row of the pages ``celery-outcomes``, ``celery-reliability`` and
``celery`` in ``docs/howto``. ``test_outcomes.py`` brings a task, a worker and three lock nodes into each situation.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import product
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded, WorkerShutdown, WorkerTerminate

from django_redlock.celery import Return
from tests.deployment import CHECKOUT

Table = dict[tuple[str, str], dict[str, list[Any]]]  # by page and heading, and then by the row


class Situation:
    """Facts and an outcome; its text has all that is not as usual."""

    def __str__(self) -> str:
        usual, names = type(self)(), [each.name for each in fields(self)]  # type: ignore[arg-type]
        shown = [f"{name}={value!r}" for name in names if (value := getattr(self, name)) != getattr(usual, name)]
        return ", ".join(shown).translate(dict.fromkeys(map(ord, "{}'"))) or "as usual"


@dataclass(frozen=True, kw_only=True)
class Message(Situation):
    """
    A message in a worker.

    Args:
        options: The options of its task, whose key is the shop.
        sent: Celery's options of the call; ``by`` its name, without the task.
        slot: Who has the slot when a worker has the message: ``own`` (the message itself), ``own run`` (its earlier
            delivery, which runs), ``nobody``, ``another run``, ``another message``, ``another claim`` (a call that is
            about to send its message), ``held`` (a run that is over, by ``hold_for``) or ``no task``. Except with
            ``own``, the message is one with an id of its own, which has no slot.
        before: What became of the message before; its task may have run, or it lost its slot.
        comes: ``again`` if the broker says that it has delivered it before, ``late`` if the worker has kept it.
        nodes: ``down``; ``one down``; ``restarted``; ``silent`` or ``slow`` as soon as the slot was taken; ``taken,
            then down`` if they fall silent when they have refused the slot.
        backend: Which of ``reads`` and ``writes`` of the result backend fail.
        broker: Whether it ``refuses`` messages.
        body: What the body does, or the error that it raises; or the place before the body, and the error there.
        event: What happens to the message in the worker's main process; otherwise a child runs it.
        times: How often it is put back first, while everything stays as it is.
        does: The outcome then. It ``runs``; is ``put back``, ``returned`` to the broker, or ``dropped`` because
            there is nothing to do or tell; or it ends without a run: ``revoked``, ``fails``, ``answered`` with a value.
        holder: Who has the slot then.
        other: Who has the slot of other arguments.
        lasts: Seconds until that slot is free, if nothing happens.
        told: The state that the caller sees in the end, when all is well again.
        runs: How often the message has run by then.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    sent: Mapping[str, Any] = field(default_factory=dict)
    slot: str = "own"
    before: str = ""
    comes: str = ""
    nodes: str = "up"
    backend: str = ""
    broker: str = ""
    body: Any = "returns"
    event: str = ""
    times: int = 0
    does: str = "runs"
    holder: str = ""
    other: str = ""
    lasts: float = 0.0
    told: str = "SUCCESS"
    runs: int = 1


@dataclass(frozen=True, kw_only=True)
class Call(Situation):
    """
    A call.

    Args:
        options: The options of its task.
        sent: Celery's options of the call.
        args: Its arguments.
        holder: Who has the slot: ``nobody``; ``claimed`` (a call that has not sent its message); a message that is
            ``waiting``; ``running``; ``pending`` (a run, and a call that waits for its end); ``held`` (a run that is
            over); ``no task``; a run that was called ``direct`` or ``applied``; ``split`` (one node has it, one has
            nothing, one is away).
        nodes: ``up``, ``down``, ``one down`` or ``second down``.
        broker: Whether it ``refuses`` messages.
        answer: What the caller gets: ``sent``; ``sent, to run after``; ``gives its arguments`` to the call that waits;
            ``joins``; ``joins the waiting``; ``skipped``; or the name of an error.
        reason: The result's ``reason``.
        has_slot: Whether its message has a slot.
        told: The state that the caller sees in the end; empty after an error.
        ran: The arguments of all runs in their order; ``first`` is that of the holder, and ``second`` that of the call.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    sent: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = (7, "second")
    holder: str = "nobody"
    nodes: str = "up"
    broker: str = ""
    answer: str = "sent"
    reason: str = ""
    has_slot: bool = False
    told: str = "SUCCESS"
    ran: str = "first"


@dataclass(frozen=True)
class Shown:
    """What another test shows, often with real processes; or a schedule of the simulation."""

    path: str
    test: str

    def exists(self) -> bool:
        """Whether it is there."""
        text = (CHECKOUT / self.path).read_text()
        return bool(re.search(rf'def {self.test}\(|"{self.test}":', text))


class Foreign:
    """An argument that neither a key nor a message can have."""

    def __repr__(self) -> str:
        return "Foreign()"


class BrokenKey:
    """A function that makes no key."""

    def __call__(self, call: Any) -> str:
        return str(call.arguments["nothing"])

    def __repr__(self) -> str:
        return "BrokenKey()"


class Limit(BaseException):
    """A limit or a kill that arrives as gevent's do."""


def made(kind: type, *chosen: Any, **facts: Any) -> list[Any]:
    """Return a situation for each choice out of the lists, which have values of one fact or of several."""
    choices = [given if isinstance(given, list) else [given] for given in chosen]
    choices += [
        [{name: one} for one in (given if isinstance(given, list) else [given])] for name, given in facts.items()
    ]
    found = []
    for parts in product(*choices):
        about: dict[str, Any] = {}
        for part in parts:
            about |= {**part, "options": {**about.get("options", {}), **part.get("options", {})}}
        found.append(kind(**about))
    return found


def parametrized(table: Table, kind: type) -> list[Any]:
    """Return the situations of one kind as parameters, each with the beginning of its row."""
    found = [(cell, case) for rows in table.values() for cell, cases in rows.items() for case in cases]
    return [pytest.param(case, id=f"{cell[:30]} | {case}") for cell, case in found if isinstance(case, kind)]


def points(page: str, heading: str) -> list[str]:
    """
    Return the rows or points of a section of a page.

    Those of tables are their first cells, with the second ones if some are empty; those of a list are what is bold, or
    the first six words.
    """
    text = (CHECKOUT / "docs" / "howto" / f"{page}.md").read_text()
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert section, f"{page} has no {heading!r}"
    found, first = [], ""
    for lines in re.findall(r"(?:^\|.*\n)+", section[1], re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()[2:]]
        for row in rows:
            first = row[0] or first
            found.append(f"{first}: {row[1]}" if any(not row[0] for row in rows) else first)
    listed = re.findall(r"^- (?:\*\*(.*?)\*\*|((?:\S+\s+){5}\S+))", section[1], re.MULTILINE)
    return found or [bold or " ".join(words.split()) for bold, words in listed]


messages, calls = partial(made, Message), partial(made, Call)

# Options
PLAIN: dict[str, Any] = {}
LATE, IGNORES = {"acks_late": True}, {"ignore_result": True}
REJECTS, DROPS = LATE | {"reject_on_worker_lost": True}, LATE | {"redelivery": "drop"}
SKIP, RAISE, RERUN, REPLACE = ({"on_duplicate": how} for how in ("skip", "raise", "rerun", "replace"))
USUAL = [PLAIN, LATE, REPLACE]
ANY = [PLAIN, SKIP, RAISE, RERUN, REPLACE]
DROP, WAIT, FOLLOW, FAIL = ({"on_overlap": how} for how in ("drop", "wait", "follow", "fail"))
ANSWER, BRIEFLY = {"on_overlap": Return("other")}, {"on_overlap": "wait", "wait_for": 0}
ONCE, QUEUED, SERIAL, BOTH = (
    {"scope": scope} for scope in ("until_executed", "until_executing", "while_executing", "until_and_while_executing")
)
SCOPES = [ONCE, QUEUED, SERIAL, BOTH]
RUNS_ANYWAY, FAILS_THEN = {"on_unavailable": {"run": "run"}}, {"on_unavailable": {"run": "fail"}}
RAISES_THEN = {"on_unavailable": {"enqueue": "raise"}}
HOLDS = {"hold_for": 60}
STARTED = {"track_started": True}
RETRIES = {"autoretry_for": (OSError,), "default_retry_delay": 100, "retry_backoff": False}

# Messages
WAITS = {"does": "put back", "holder": "another running"}
REVOKED = {"does": "revoked", "told": "REVOKED", "runs": 0}
FAILS = {"does": "fails", "told": "FAILURE", "runs": 0}
LOST = {"does": "dropped", "told": "PENDING", "runs": 0}
GOES_ON = {"holder": "own queued", "runs": 2}
BACK = {"does": "put back", "holder": "own queued"}
REPLACED = {"before": "was replaced", "does": "dropped"}
IS_OVER = {"before": "has run", "comes": "again", "does": "dropped"}
STOPPED = {"options": DROPS, "before": "was stopped", "comes": "again"}
WATCHES = {"slot": "own run", "comes": "again", "does": "put back", "holder": "own running"}
RETURNS = {"event": "child dies", "does": "returned", "holder": "own queued"}
CLAIMED = {"slot": "another claim", "does": "put back", "holder": "another claimed"}
FOR_LONG = {"slot": "no task, for long", "does": "put back", "holder": "another held", "runs": 0}
LOST_TO_ANOTHER = {"slot": "own, then another run", "holder": "another running"}
DIED = LOST_TO_ANOTHER | {"before": "was killed", "comes": "again", "does": "put back"}
ENDS_AS = [
    {"options": how, "told": told}
    for how, told in ((DROP, "REVOKED"), (BRIEFLY, "REVOKED"), (FAIL, "FAILURE"), (ANSWER, "SUCCESS"))
]
TAKEN = [
    {"slot": "another run", "holder": "another running"},
    {"slot": "another message", "holder": "another queued"},
    {"slot": "no task", "holder": "another held"},
    {"slot": "held", "holder": "another held", "options": HOLDS},
]
BY_NAME, FREELY, IN_HEADERS = {"by": "name"}, {"singleton": False}, {"headers": {"headers": {"colour": "red"}}}
ENDS_SOON = [{"lasts": 3}, {"lasts": 2, "options": {"lease": 2}}]
STOPS = [SystemExit(-15), WorkerShutdown(), WorkerTerminate()]
BEFORE = ("before_start", "task_prerun", "on_task_init")
ASKS = [  # messages about which a worker asks the nodes once more when it has their slot
    {"comes": "late"},
    {"comes": "again", "options": LATE},
    {"comes": "again", "options": LATE | RERUN},
    {"options": REPLACE},
]

# Calls
SENT = {"has_slot": True, "ran": "second"}
UNSLOTTED = {"ran": "second"}
AFTER = {"answer": "sent, to run after", "has_slot": True, "ran": "first second"}
TAKES_OVER = {"answer": "gives its arguments", "has_slot": True, "ran": "second"}
SKIPPED = {"answer": "skipped", "told": "REVOKED"}
RAISES = {"answer": "DuplicateTask", "told": ""}
UNKNOWN = {"answer": "QuorumUnavailableError", "told": ""}
HOLDERS = [
    {"holder": "waiting", "reason": "queued"},
    {"holder": "running", "reason": "running"},
    {"holder": "held", "reason": "held", "options": HOLDS},
]
LINKED = {"holder": "waiting with a link", "reason": "queued", "ran": "first second linked"}
SAME_PENDING = {"holder": "pending", "args": (7, "pending"), "reason": "running", "ran": "first pending"}
OVER = [f"waits, but is {state}" for state in ("REVOKED", "FAILURE", "SUCCESS")]

PAGE = Shown("tests/server/workers/test_page.py", "test_lost_worker")

EVENTS = {
    "The body returns or raises, `Ignore`, `Reject`, soft time limit, `sys.exit`": [
        *messages(options=[*SCOPES, LATE, REPLACE, DROPS]),
        *messages(options=USUAL, body=[ValueError(), SoftTimeLimitExceeded()], told="FAILURE"),
        *messages(options=[PLAIN, LATE], body=[Ignore(), Reject(), SystemExit(1)], told="PENDING"),
        *messages(options=IGNORES, told="PENDING"),
        *messages({"options": HOLDS}, options=[*SCOPES, QUEUED | REPLACE, BOTH | RERUN], holder="own held", lasts=60),
        *messages(before="lost its header"),  # the worker makes it from the arguments
    ],
    "`retry()`, `autoretry_for`, `replace()` by itself": [
        *messages(GOES_ON, options=[ONCE, QUEUED, BOTH, LATE, RERUN, REPLACE, HOLDS], body="retries"),
        *messages(options=[SERIAL, SERIAL | HOLDS], body="retries", runs=2),
        *messages(GOES_ON, options=RETRIES, body=OSError()),
        *messages(GOES_ON, body=["retries", "replaces itself"], sent=[{}, IN_HEADERS]),
        *messages(body="is overtaken by its retry", runs=2),
        *messages(body="retries without its slot", holder="another queued", runs=2),
        *messages(body="retries", broker="refuses", told="PENDING"),
    ],
    "`retry()` that names other arguments": [
        *messages(body="retries with other arguments", other="own queued", runs=2),
        *messages(options=SERIAL, body="retries with other arguments", runs=2),
    ],
    "`apply_async` of your own task class that sends later, as with `transaction.on_commit`": [
        Shown("tests/unit/celery/test_dispatch.py", "test_own_class_that_sends_after_the_commit"),
    ],
    "Wrong or unserialisable arguments, broker not reachable": [
        *calls(args=[(), (Foreign(),)], answer="TypeError", told="", ran=""),
        *calls(args=(7, Foreign()), answer="EncodeError", told="", ran=""),
        *calls(options={"key": BrokenKey()}, answer="KeyError", told="", ran=""),
        *calls(options=ANY, broker="refuses", answer="OperationalError", told="", ran=""),
    ],
    "Rolled-back transaction, with `delay_on_commit`": [
        Shown("tests/unit/celery/test_dispatch.py", "test_call_on_commit"),
    ],
    "Child, worker or machine killed": [Shown("tests/server/workers/test_page.py", "test_killed_child"), PAGE],
    "Hard or soft time limit, `revoke(terminate=True)`, `sys.exit` or an error before the body begins "
    "(in `before_start` or in a receiver of `task_prerun`)": [
        *messages(LOST, options=USUAL, body=[(place, Limit()) for place in BEFORE]),
        *messages(LOST, options=[PLAIN, REPLACE], body=[(place, SystemExit(-15)) for place in BEFORE]),
        *messages(options=LATE, body=[(place, STOPS[0]) for place in BEFORE], does="returned", holder="own queued"),
        *messages(
            FAILS, options=USUAL, body=[("before_start", error) for error in (SoftTimeLimitExceeded(), ValueError())]
        ),
        *messages(LOST, options=USUAL, body=[("before_start", Reject())]),
        *messages(FAILS, options=USUAL, event="exceeds its hard limit before it begins"),
        *messages(REVOKED, options=USUAL, event="is terminated before it begins"),
    ],
    "Worker killed before the body begins, with early acknowledgement": [
        *messages(LOST, event="worker dies before it begins", holder="own queued", lasts=3600),
    ],
    "Hard time limit": [
        *messages(FAILS, ENDS_SOON, event="exceeds its hard limit", holder="own running"),
    ],
    "`revoke()` of a waiting task": [
        *messages(REVOKED, options=[*SCOPES, LATE, RERUN, REPLACE], event="is revoked"),
        *messages(REVOKED, options=RERUN, slot="own beside another run", event="is revoked", holder="another running"),
        *messages(REVOKED, options=[ONCE, QUEUED, RERUN, REPLACE], sent={"countdown": 7200}, event="is cancelled"),
        *messages(REVOKED, options=REPLACE, before=["", "was replaced"], event="is cancelled, and comes"),
        *messages(REVOKED, options=REPLACE, before="replaced another", event=["is revoked", "expires"]),
    ],
    "`revoke(terminate=True)`": [
        *messages(REVOKED, options=[PLAIN, LATE], event="is terminated", holder="own running"),
    ],
    "Expired, unknown task, a message that cannot be decoded": [
        *messages(REVOKED, options=[*SCOPES, LATE, RERUN, REPLACE], event="expires"),
        *messages(LOST, options=USUAL, event=["is unknown", "cannot be read", "is rejected"]),
        *messages(options=LATE, event="is rejected for later", does="returned", holder="own queued"),
        *messages(options=REPLACE, before="was replaced", event="expires", does="dropped", holder="own queued"),
        *messages(WATCHES, options=[LATE, LATE | REPLACE], event="expires"),
        *messages(REVOKED, options=[RUNS_ANYWAY, FAILS_THEN], event="expires", nodes="down"),
        *messages(BACK, event="expires", nodes="down"),
        *messages(options=REPLACE, event="expires", nodes="down", does="put back"),
        *messages(BACK, options=REPLACE, before="was replaced", event="expires", nodes="down"),
    ],
    "Warm shutdown": [Shown("tests/server/workers/test_shutdown.py", "test_warm_shutdown")],
    "Cold or soft shutdown": [
        *messages(body=STOPS, told="PENDING"),
        *messages(options=[LATE, LATE | RERUN, LATE | REPLACE], body=STOPS, holder="own claimed", lasts=10, runs=2),
        *messages({"options": LATE}, options=[QUEUED, SERIAL, BOTH], body=STOPS[0], runs=2),
        *messages(options=DROPS, body=STOPS[0], told="REVOKED"),
    ],
    "Queue purged, message lost": [
        *messages(LOST, options=[ONCE, QUEUED, BOTH, REPLACE], event="is lost", holder="own queued", lasts=3600),
        *messages(LOST, options={"queue_ttl": 60}, event="is lost", holder="own queued", lasts=60),
        *messages(LOST, sent={"countdown": 600}, event="is lost", holder="own queued", lasts=4200),
        *messages(LOST, sent={"expires": 100}, event="is lost", holder="own queued", lasts=100),
        *messages(LOST, options=[ONCE, QUEUED, BOTH, REPLACE], event="is lost, and its slot released"),
    ],
    "Same message delivered twice (visibility timeout, lost connection)": [
        *messages(WATCHES, {"options": LATE}, options=[ONCE, SERIAL, BOTH, DROPS, RERUN, REPLACE]),
        *messages(WATCHES, {"options": LATE}, options=[FAIL, FOLLOW, ANSWER, BRIEFLY, FAILS_THEN, RUNS_ANYWAY]),
        *messages(WATCHES, options=[LATE | IGNORES, DROPS | IGNORES], told="PENDING"),
        *messages(WATCHES, options=LATE, before="came again", does="dropped"),
        *messages(WATCHES, options=LATE | {"max_hold": 7200}, before="has run for 90 minutes"),
        *messages(options=LATE, slot="own run", comes="again", before="has run for 90 minutes", runs=2),
        *messages(WATCHES, options=LATE, body=ValueError(), runs=2),
        *messages(options=LATE | QUEUED, slot="own run", comes="again", runs=2),
        *messages(REVOKED, options=DROPS | QUEUED, before="was stopped", comes="again", runs=1),
        *messages(IS_OVER, {"options": LATE}, options=[ONCE, QUEUED, RERUN, REPLACE]),
        *messages(IS_OVER, options=LATE, before="a copy has run", comes="late"),
        *messages(IS_OVER, options=LATE | IGNORES, told="PENDING"),
        *messages(IS_OVER, options=LATE | IGNORES, before="a copy has run", comes="late", told="PENDING"),
        *messages(IS_OVER, options=IGNORES, before="has run, after a long wait", told="PENDING"),
        *messages(options=LATE, before="has run, stored nothing", comes="again", does="put back", runs=2),
        *messages(options=LATE, before="has failed", comes="again", runs=2),
        *messages(IS_OVER, options=LATE, before="has retried", holder="own queued", runs=2),
        *messages(IS_OVER, options=LATE | SERIAL, before="has retried", runs=2),
        *messages(IS_OVER, options=LATE, before="has retried, and the retry too", runs=2),
        *messages(WATCHES, options=[DROPS, DROPS | REPLACE], body=SystemExit(-9), told="REVOKED"),
    ],
    "A call finds a duplicate that waits for a countdown or eta": [
        *calls(SENT, options=ANY, holder=OVER),
        *calls(options=[RERUN, REPLACE], args=(7, "first"), holder=OVER, has_slot=True),
        *calls(holder="waits for its time", answer="joins", reason="queued"),
        *calls(TAKES_OVER, options=REPLACE, holder="waits for its time", reason="queued"),
    ],
    "Too few nodes answer, or the lease cannot be renewed": [
        Shown("tests/unit/celery/test_strategies.py", "test_stolen_slot_is_told"),
    ],
}
FAULTS = {
    "One lock node of three is silent, and several calls are made at the same moment": [
        Shown("tests/slots/profiles.py", "at once, one silent"),
    ],
    "A claim reaches a lock node after its own run": [Shown("tests/slots/profiles.py", "far nodes, one silent")],
    "A lock node kept an entry of a call that has ended, and another node is silent": [
        *messages(options=[DROP, WAIT], slot="left on a node", nodes="second down"),
        *calls(options=ANY[:4], holder="split", nodes="second down", ran="first second"),
    ],
    "A process dies between its claim and its message": [
        *messages(CLAIMED, options=[DROP, WAIT, FOLLOW, FAIL, ANSWER, BRIEFLY]),
        *calls(options=[*SCOPES, SKIP, RAISE, RERUN], holder="claimed", ran="second another"),
    ],
    "The broker does not accept the message": calls(
        nodes=["up", "one down", "down"], broker="refuses", answer="OperationalError", told="", ran=""
    ),
    "The result backend is away or slow before a run": [
        *messages(options=USUAL, backend="reads"),
        *messages(options=[LATE | IGNORES, DROPS | IGNORES], comes="again", backend="reads", told="PENDING"),
        *messages(options=LATE | IGNORES, comes="late", backend="reads", told="PENDING"),
        *messages(FAILS, options=LATE, comes="again", body=("result backend", SoftTimeLimitExceeded())),
        *messages({"options": LATE}, options=[PLAIN, RERUN], comes="again", backend="reads", times=10),
        *messages({"options": LATE | RUNS_ANYWAY}, options=[PLAIN, REPLACE], comes="again", backend="reads"),
        *messages(options=STARTED, backend="writes", told="PENDING"),
        *messages(options=STARTED, body="sees that it is STARTED"),
    ],
    "The result backend is away or full when a message is to end without a run, or "
    '`on_overlap="follow"` needs the other result': [
        *messages(TAKEN[:3], options=[DROP, BRIEFLY, FAIL, ANSWER], backend="writes", does="put back"),
        *messages(FOR_LONG, ENDS_AS, backend="writes"),
        *messages(WAITS, options=FOLLOW, slot="another run", backend="reads", runs=0),
        *messages(WAITS, options=FOLLOW | IGNORES, slot="another run", backend="reads", told="PENDING"),
        *messages(STOPPED, backend="reads writes", times=15, does="put back", told="REVOKED"),
    ],
    "The result backend is away after the body has run": [
        *messages(options=USUAL, backend="writes", told="PENDING"),
    ],
    "The lock nodes fall silent between the slot and the body": [
        *messages(ASKS, nodes="silent", does="put back"),
        *messages(ASKS, options=RUNS_ANYWAY, nodes="silent"),
        *messages(ASKS, FAILS, options=FAILS_THEN, nodes="silent"),
    ],
    "The slot is lost before the body begins, because a question took longer than `lease`": [
        *messages(options=[PLAIN, LATE, RUNS_ANYWAY, REPLACE], nodes="slow", does="put back"),
        *messages(FAILS, {"options": FAILS_THEN}, options=USUAL, nodes="slow"),
    ],
    "With late acknowledgement, a worker, the connection to the broker or (with `reject_on_worker_lost`) a child ends "
    "during the run, or the body rejects its message with `requeue=True`; or the body retries": [
        *messages(DIED, {"options": LATE}, options=[DROP, FOLLOW, FAIL, ANSWER, BRIEFLY, REPLACE]),
        *messages(
            DIED, options=[DROP, FAIL, ANSWER, BRIEFLY], before="has retried, and lost its slot", comes="", runs=2
        ),
        *messages(options=LATE, body=Reject(requeue=True), runs=2),
        *messages(options=LATE, body="dies before it sends a retry", holder="own claimed", runs=2),
        *messages(REVOKED, STOPPED, runs=1),
        *messages(options=DROPS, before=["was killed", "waited too long"], comes="again"),
    ],
    "The broker does not accept a message that is put back": [
        *messages(options=LATE | WAIT, slot="another run", broker="refuses", does="returned", holder="another running"),
        *messages(FAILS, options=WAIT, slot="another run", broker="refuses", holder="another running"),
        *messages(WATCHES, options=LATE, broker="refuses", does="returned"),
        *messages(WATCHES, broker="refuses", does="dropped"),
        *messages(options=LATE, nodes="down", broker="refuses", does="returned"),
        *messages(FAILS, nodes="down", broker="refuses"),
    ],
}
OVERLAPS = {
    '`"wait"`': [
        *messages(TAKEN, options=WAIT, does="put back"),
        *messages(WAITS, options=[SERIAL, BOTH], slot="another run"),
        *messages(WAITS, options=[BOTH, RERUN, REPLACE], slot="own beside another run"),
        *messages(REVOKED, TAKEN, options=BRIEFLY),
        *messages(REVOKED, options=BOTH | BRIEFLY, slot="own beside another run", holder="another running"),
        *messages(REVOKED, options=WAIT | {"wait_for": 0.1}, slot="no task", times=1, holder="another held"),
        *messages(WAITS, options=WAIT, sent=[{"expires": 100}, {"ignore_result": False}], slot="another run"),
        *messages(WAITS, options=WAIT, sent={"ignore_result": True}, slot="another run", told="PENDING"),
    ],
    '`"drop"`': [
        *messages(REVOKED, TAKEN, sent=[{}, BY_NAME]),
        *messages(REVOKED, options=QUEUED, slot="another message", holder="another queued"),
        *messages(REVOKED, options=BOTH | DROP, slot="own beside another run", holder="another running"),
        *messages(options=QUEUED, slot="another run"),
        *messages(slot="another run", sent=FREELY, holder="another running"),
        *messages(slot="another run", sent=FREELY, body="retries", holder="another running", runs=2),
        *messages(LOST, options=IGNORES, slot="another run", holder="another running"),
        *messages(options=DROP, before=["waited too long", "was never confirmed"]),
        *messages(options=[ONCE, QUEUED, BOTH], slot="nobody", sent=[{}, BY_NAME]),
        *messages(REVOKED, LOST_TO_ANOTHER, before=["waited too long", "was never confirmed"]),
    ],
    '`"follow"`': [
        *messages(TAKEN[:2], options=FOLLOW, does="put back", runs=0),
        *messages(options=FOLLOW, slot="no task", does="put back", holder="another held"),
        *messages(WAITS, options=FOLLOW, slot="another run, which fails", told="FAILURE", runs=0),
        *messages(options=FOLLOW, slot="another message, which is lost", does="put back", holder="another queued"),
        *messages(WAITS, options=FOLLOW | IGNORES, slot="another run", told="PENDING"),
    ],
    '`"fail"`': messages(FAILS, TAKEN, options=FAIL, sent=[{}, BY_NAME]),
    "`Return(value)`": messages(TAKEN, options=ANSWER, does="answered", runs=0),
}
TREATED = {
    "A call whose id is given": [
        *calls(UNSLOTTED, sent={"task_id": "given"}, nodes=["up", "down"]),
        *calls(options=ANY, sent={"task_id": "given"}, holder=["waiting", "running"], ran="first second"),
    ],
    "A run that calls its own task": [
        Shown("tests/unit/celery/test_strategies.py", "test_run_that_waits_for_its_own_end")
    ],
    "A duplicate with `link` or `link_error`": [
        *calls(RAISES, options=ANY, sent={"link": "linked"}, holder=["waiting", "running"]),
        *calls(options=ANY, sent={"link": "linked"}, has_slot=True, ran="second linked"),
        *calls(AFTER, LINKED, options=[RERUN, REPLACE]),
    ],
    "A run of a direct call or of `apply()`": [
        *calls(SKIPPED, options={"lock_direct_calls": True}, holder=["direct", "applied"], reason="running"),
    ],
    "A holder that was sent with `ignore_result=True`": [
        *calls(holder="waiting, without a result", answer="joins", reason="queued", told="PENDING"),
    ],
    "In a beat schedule": [
        Shown("tests/unit/celery/test_strategies.py", "test_raise_in_beat_is_one_line"),
        Shown("tests/unit/celery/test_strategies.py", "test_tick_of_a_second_beat_is_not_worth_a_line"),
    ],
}
UNAVAILABLE = {
    '`"enqueue"`: `"publish"` (default)': [
        *calls(UNSLOTTED, options=[*ANY[:4], QUEUED, SERIAL, BOTH], nodes="down"),
        *calls(SENT, options=REPLACE, nodes="down"),  # some nodes may have the record of the call, which has its secret
        *calls(SENT, options=ANY, nodes="one down"),
        *calls(HOLDERS, nodes="one down", answer="joins"),
    ],
    '`"enqueue"`: `"raise"`': [
        *calls(UNKNOWN, {"options": RAISES_THEN}, options=[*ANY, QUEUED, BOTH], nodes="down", ran=""),
        *calls(UNKNOWN, {"options": RAISES_THEN}, options=ANY[:4], holder="claimed", ran="another"),
        *calls(UNKNOWN, {"options": RAISES_THEN}, options=ANY[:4], holder="split", nodes="second down"),
    ],
    '`"run"`: `"retry"` (default)': [
        *messages(BACK, options=[ONCE, BOTH, LATE, RERUN, REPLACE], nodes="down", times=7),
        *messages(BACK, options={"max_retries": 0}, nodes="down", times=7),
        *messages(options=SERIAL, nodes="down", does="put back"),
        *messages(nodes="restarted", does="put back"),
    ],
    '`"run"`: `"run"`': [
        *messages({"options": RUNS_ANYWAY}, options=[*SCOPES, REPLACE], nodes="down"),
        *messages(WATCHES, options=LATE | RUNS_ANYWAY, nodes="taken, then down"),
    ],
    '`"run"`: `"fail"`': [
        *messages(FAILS, {"options": FAILS_THEN}, options=[ONCE, SERIAL, BOTH, RERUN, REPLACE], nodes="down"),
        *messages(options=FAILS_THEN | QUEUED, nodes="down"),  # whose runs have no slot
        *messages(IS_OVER, options=[LATE | FAILS_THEN, LATE | RUNS_ANYWAY], nodes="down"),
    ],
}
KILLED = {
    "the child process that runs it: none": messages(FAILS, event="child dies"),
    "the child process that runs it: `acks_late=True`": [
        *messages(FAILS, {"options": LATE}, options=[PLAIN, DROPS, RERUN, REPLACE], event="child dies"),
        *messages(FAILS, options=LATE, event="child dies before it begins"),
        *messages(FAILS, options=REPLACE, before="replaced another", event="child dies before it begins"),
    ],
    "the child process that runs it: `acks_late=True, reject_on_worker_lost=True`": [
        *messages(RETURNS, {"options": REJECTS}, options=[PLAIN, RERUN, REPLACE], lasts=30),
        *messages(RETURNS, options=REJECTS | {"lease": 5}, lasts=5),
        *messages(RETURNS, options=REJECTS | {"redelivery": "drop"}, holder=""),
        *messages(RETURNS, options=REJECTS, event="child dies before it begins"),
    ],
    "the whole worker: none": messages(LOST, event="worker dies", holder="own running", lasts=30),
    "the whole worker: `acks_late=True`": [
        *messages(options=[LATE, LATE | RERUN], event="worker dies", does="returned", holder="own running", lasts=30),
        *messages(DIED, options=LATE),
        *messages({"options": LATE}, options=[ONCE, SERIAL, BOTH, REPLACE], before="was killed", comes="again"),
    ],
    "the machine: none": [PAGE],
    "the machine: `acks_late=True`": [PAGE],
}
DUPLICATES = {
    '`"join"` (default)': [
        *calls(SENT, options=[ONCE, QUEUED, BOTH]),
        *calls(HOLDERS, answer="joins"),
        *calls(options=IGNORES, holder="running", answer="joins", reason="running", told="PENDING"),
        *calls(SKIPPED, holder="no task", reason="held", ran=""),
    ],
    '`"skip"`': [
        *calls(SKIPPED, HOLDERS, options=SKIP),
        *calls(SKIPPED, options=SKIP, holder="no task", reason="held", ran=""),
    ],
    '`"raise"`': [
        *calls(RAISES, HOLDERS, options=RAISE),
        *calls(RAISES, options=RAISE, holder="no task", ran=""),
        *calls(RAISES, sent={"singleton": {"on_duplicate": "raise"}}, holder="waiting"),
    ],
    '`"rerun"`': [
        *calls(SENT, options=RERUN),
        *calls(AFTER, HOLDERS, options=RERUN),
        *calls(TAKES_OVER, options=RERUN | QUEUED, holder="waiting", reason="queued"),
        *calls(TAKES_OVER, options=RERUN, holder="pending", reason="running", ran="first second"),
        *calls(SAME_PENDING, options=RERUN, answer="joins the waiting"),
    ],
    '`"replace"`': [
        *calls(SENT, options=REPLACE),
        *calls(TAKES_OVER, options=REPLACE, holder="waiting", reason="queued"),
        *calls(AFTER, HOLDERS[1:], options=REPLACE),
        *calls(TAKES_OVER, options=REPLACE, holder="pending", reason="running", ran="first second"),
        *calls(TAKES_OVER, SAME_PENDING, options=REPLACE),
        *messages(REPLACED, options=REPLACE, holder="own queued"),
        *messages(REPLACED, options=[RERUN, REPLACE], slot="own beside another run", holder="another running"),
    ],
}
EXCLUDES = {
    '`"until_executed"` (default)': calls(HOLDERS[:2], answer="joins"),
    '`"until_executing"`': [
        *calls(options=QUEUED, holder="waiting", answer="joins", reason="queued"),
        *calls(options=QUEUED, holder="running", has_slot=True, ran="first second"),
        *calls(options=QUEUED, holder="pending", answer="joins the waiting", reason="queued", ran="first pending"),
    ],
    '`"while_executing"`': calls(options=SERIAL, holder=["waiting", "running"], ran="first second"),
    '`"until_and_while_executing"`': [
        *calls(options=BOTH, holder="waiting", answer="joins", reason="queued"),
        *calls(options=BOTH, holder="running", has_slot=True, ran="first second"),
        *calls(options=BOTH, holder="pending", answer="joins the waiting", reason="queued", ran="first pending"),
    ],
}

TABLE: Table = {
    ("celery-outcomes", "Celery: what happens when"): EVENTS,
    ("celery-outcomes", "Something fails: who is told what"): FAULTS,
    ("celery-outcomes", "A worker finds the slot taken: on_overlap"): OVERLAPS,
    ("celery-outcomes", "Calls that are treated differently"): TREATED,
    ("celery-reliability", "When too few nodes answer: on_unavailable"): UNAVAILABLE,
    ("celery", "A worker or its child is killed"): KILLED,
    ("celery", "A call finds the slot taken: on_duplicate"): DUPLICATES,
    ("celery", "Who excludes whom: scope"): EXCLUDES,
}
