"""
What happens to a call of a singleton task of Django's, and to its row in a worker, as data: facts, and the outcome.

Each situation stands under the first words of a point of ``docs/howto/tasks.md``. ``test_outcomes.py`` plays them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from typing import Any

from tests.unit.celery.outcomes import (
    BOTH,
    FAILS_THEN,
    HOLDERS,
    HOLDS,
    ONCE,
    QUEUED,
    RAISE,
    RAISES_THEN,
    RUNS_ANYWAY,
    SCOPES,
    SERIAL,
    SKIP,
    Shown,
    Situation,
    made,
)


@dataclass(frozen=True, kw_only=True)
class Call(Situation):
    """
    A call.

    Args:
        options: The options of its task, whose key is the shop.
        holder: Who has the slot: ``nobody``; ``waiting`` (a row); ``waiting in its worker``; ``running``; ``held`` (a
            run that is over); ``no task``; ``gone`` (a row that was purged); ``finished`` (a row that ran while the
            nodes were away); ``cancelled``; ``this transaction`` or ``another transaction``, which has stored a row and
            is still open; ``a long transaction`` (the same, for more than ten seconds); ``rolled back`` by this thread
            or another.
        nodes: ``up`` or ``down``.
        since: The argument that is not part of the key.
        answer: What the caller gets: ``stored`` (a row of its own), ``joins``, ``skipped``, or the name of an error.
        reason: The result's ``reason``.
        has_slot: Whether the slot names the row of the call afterwards.
        rows: The rows that are stored then, the oldest first.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    holder: str = "nobody"
    nodes: str = "up"
    since: Any = "second"
    answer: str = "stored"
    reason: str = ""
    has_slot: bool = False
    rows: str = "first"


@dataclass(frozen=True, kw_only=True)
class Row(Situation):
    """
    A row in a worker.

    Args:
        options: The options of its task.
        slot: Who has the slot: ``own`` (the row), ``nobody``, ``another row``, ``another process`` (for 20 seconds) or
            ``the run itself``, which enqueues the same call on a backend that runs it at once.
        before: Whether it ``was cancelled`` or ``waited too long`` before.
        nodes: ``up``; ``down``; ``away`` for a while.
        body: What the body does.
        does: Whether it ``runs``; the row ``fails`` because of its body; or the error that keeps it from running.
        during: Who has the slot during the run; None if that depends on the scope.
        holder: Who has it afterwards.
        lasts: Seconds until that slot is free.
        waited: Seconds for which the row has occupied its worker, at least.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    slot: str = "own"
    before: str = ""
    nodes: str = "up"
    body: Any = "returns"
    does: str = "runs"
    during: str | None = "own running"
    holder: str = ""
    lasts: float = 0.0
    waited: float = 0.0


calls, rows = partial(made, Call), partial(made, Row)

OWN = {"has_slot": True, "rows": "second"}
CANCELLED = {"does": "CancelledTask", "during": ""}
UNKNOWN = {"answer": "QuorumUnavailableError", "rows": ""}
FOREIGN = date(2026, 1, 1)
REFUSED = Shown("tests/unit/tasks/test_tasks.py", "test_option_that_cannot_work_is_refused_at_once")
ANYWAY = {"options": RUNS_ANYWAY, "nodes": "down"}
FAILS = {"options": FAILS_THEN, "nodes": "down", "does": "QuorumUnavailableError", "during": ""}
WORKERS = partial(Shown, "tests/server/tasks/test_workers.py")

TABLE: dict[tuple[str, str], dict[str, list[Any]]] = {
    ("tasks", "A call finds the slot taken: on_duplicate"): {
        '`"join"`, the default: the call gets': [
            *calls(OWN, options=[ONCE, QUEUED, BOTH]),
            *calls(OWN, holder=["gone", "cancelled"]),
            *calls(
                {"options": RUNS_ANYWAY}, options=[ONCE, BOTH], holder="finished", has_slot=True, rows="first second"
            ),
            *calls(HOLDERS, answer="joins"),
            *calls(options=[QUEUED, BOTH], holder="waiting", answer="joins", reason="queued"),
            *calls(options=QUEUED, holder="running", has_slot=True, rows="first second"),
            *calls(options=BOTH, holder="running", rows="first second"),
            *calls(options=BOTH, holder="waiting in its worker", answer="joins", reason="queued"),
            *calls(options=SERIAL, holder="waiting", rows="first second"),
            *calls(holder="no task", answer="skipped", reason="held", rows=""),
        ],
        '`"skip"`: it gets a result with': [
            *calls(HOLDERS, options=SKIP, answer="skipped"),
            *calls(OWN, options=SKIP),
        ],
        '`"raise"`: it raises `DuplicateTask(holder_id, state, retry_after)`,': [
            *calls(HOLDERS, options=RAISE, answer="DuplicateTask"),
            *calls(OWN, options=RAISE),
        ],
    },
    ("tasks", "Transactions"): {
        "A second call of the same": [
            *calls(holder="this transaction", answer="joins", reason="queued"),
            *calls(options=SKIP, holder="this transaction", answer="skipped", reason="queued"),
            *calls(options=RAISE, holder="this transaction", answer="DuplicateTask"),
        ],
        "A call of another process waits": [
            *calls(options=[{}, SKIP, RAISE], holder="another transaction", rows="first second"),
            *calls(UNKNOWN, options=RAISES_THEN, holder="another transaction", rows="first"),
        ],
        "After a rollback, the slot is": [
            *calls(OWN, options=[{}, SKIP, RAISE], holder="rolled back"),
            *calls(OWN, holder="rolled back by another"),
            WORKERS("test_rolled_back_call"),
        ],
        "In a transaction of more than": calls(holder="a long transaction", has_slot=True, rows="first second"),
        "At REPEATABLE READ, a transaction on": [WORKERS("test_calls_of_several_processes")],
    },
    ("tasks", "A worker dies"): {
        "A worker imports the module of": [WORKERS("test_row_is_not_reaped_while_its_process_lives")],
        "Runs of a plain `@task`, or": [WORKERS("test_row_is_not_reaped_while_its_process_lives")],
        "A row whose worker is killed": [
            *rows(before="waits for ever", does="", during="", holder="own queued", lasts=3600),
            *rows(
                options={"queue_ttl": 60}, before="waits for ever", does="", during="", holder="own queued", lasts=60
            ),
            WORKERS("test_killed_workers"),
        ],
    },
    ("tasks", "Too few nodes answer: on_unavailable"): {
        '`enqueue`: `"publish"` stores the row without': [
            *calls(options=[*SCOPES, SKIP, RAISE], nodes="down", rows="second"),
            *calls(UNKNOWN, options=RAISES_THEN, nodes="down"),
        ],
        '`run`: with `"retry"`, the row waits': [
            *rows(options=[ONCE, SERIAL, BOTH], nodes="away", waited=19),
            *rows(ANYWAY, options=[ONCE, BOTH], during="own queued", holder="own queued"),  # a call takes that over
            *rows(ANYWAY, options=SERIAL, during=""),
            *rows(FAILS, options=[ONCE, BOTH], holder="own queued"),
            *rows(FAILS, options=SERIAL),
        ],
    },
    ("tasks", "What is refused, and what differs from Celery"): {
        "`on_overlap`, `wait_for`": [REFUSED],
        "`redelivery`": [REFUSED],
        "`lock_direct_calls`": [REFUSED],
        '`on_duplicate="rerun"`': [REFUSED],
        '`on_duplicate="replace"`': [REFUSED],
        "finds its slot taken": [
            *rows(options=[SERIAL, BOTH], slot="another process", waited=19),
            *rows(options=[ONCE, SERIAL, BOTH], slot="nobody"),
            *rows(options=QUEUED, slot=["own", "nobody"], during=""),
            *rows(slot="another row"),
            *rows(options=QUEUED, slot="another row", during="another queued", holder="another queued"),
            *rows(options=[ONCE, BOTH, SERIAL], before="waited too long"),
        ],
        "a skipped call": calls(HOLDERS, options=SKIP, answer="skipped"),
        "after a killed worker": [WORKERS("test_killed_workers")],
        "arguments": [
            *calls(since=FOREIGN, answer="TypeError", rows=""),
            *rows(options=SCOPES, slot="own", body=["returns", ValueError()], during=None),
            *rows({"options": HOLDS}, options=[ONCE, QUEUED, BOTH], during=None, holder="own held", lasts=60),
            *rows(CANCELLED, options=[ONCE, QUEUED, BOTH], before="was cancelled"),
        ],
    },
}
