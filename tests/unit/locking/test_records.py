"""Records that change by compare and set: their times, and the groups that fit in a write."""

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest

from django_redlock.core.protocol import POSITIVE, Acquire, Extend, Failure, Kind, Reply, Request, Term
from django_redlock.nodes.base import LinkError
from django_redlock.nodes.records import record as records
from django_redlock.nodes.records.record import Moment, Stored, in_present_era, needed_until, parsed
from django_redlock.nodes.records.table import RecordTable, UntouchedError, batches, chunked
from django_redlock.nodes.records.worker import AsyncWorkerLink

NOW = 1_700_000_000_000_000
TTL = 30.0


def acquire(secret: str, *names: str, **changed: Any) -> Acquire:
    slugs = tuple("{" + name + "}" for name in names or ("x",))
    return Acquire(slugs, secret * 32, secret * 32 + "{}", TTL, NOW, 3600.0, 1e9)._replace(**changed)


# Groups that fit in one write


def test_groups_of_requests():
    """Groups hold as many requests as fit, in their order; no group is empty."""
    small: list[Request] = [acquire("a"), acquire("b"), acquire("c")]

    assert [len(batch) for batch in batches(small, 10, 4)] == [2, 1]
    assert list(batches([], 10, 4)) == []
    assert chunked(small[0], 1) == [small[0]]
    term = Term(("{x}", "{y}"), "a" * 32, "v", TTL, 1)
    assert [len(one.terms) for one in chunked(Extend((term,) * 3, None), 4) if isinstance(one, Extend)] == [2, 1]


class Breaking(RecordTable):
    """A table whose store breaks after the first group of requests."""

    part = most = 10
    groups = 0

    def _together(self, requests: Sequence[Request]) -> list[Reply]:
        self.groups += 1
        if self.groups > 1:
            raise UntouchedError(Failure.RESET)
        return [Reply(Kind.ACCEPTED, NOW)] * len(requests)


def test_store_that_breaks_between_two_groups_leaves_an_unknown_outcome():
    """The first group has been written, so the request may have been carried out."""
    with pytest.raises(LinkError) as unclear:
        Breaking(1.0).execute([acquire("a", *(f"n{number}" for number in range(25)))])

    assert not isinstance(unclear.value, UntouchedError)


# Records that another program changed

FOREIGN: list[Any] = [
    5,
    {"holder": 5},
    {"holder": ["x", "y"]},
    {"holder": ["x", 10**400]},
    {"holder": ["0" * 32, 5.0], "sharers": {"a": "b"}},
    {"queue": 5},
    {"queue": {"a": ["x", "y"]}},
    {"fence": ["a", 1]},
    {"fence": [1, "z"], "era": "old", "written": 10**400},
    {"until": "x", "era": "old", "written": 3.0},
    {"holder": ["x", "y"], "era": "old", "written": 3.0},
]


@pytest.mark.parametrize("text", [*map(json.dumps, FOREIGN), "[" * 100_000, "{", ""], ids=lambda text: text[:40])
def test_record_that_another_program_changed_is_read(text: str):
    """Whatever is stored under a key, requests for it are decided, and it is listed and cleaned up."""
    moment = Moment(100.0, 101.0, "new", 50.0)
    stored = Stored(1, parsed(text))
    known = records.load(
        records.names_of([acquire("a")]), lambda kind, name: f"{kind}{name}", lambda keys: (moment, {"h{x}": stored})
    )

    assert known.execute(acquire("a")).kind in (*POSITIVE, Kind.BUSY, Kind.QUEUED)
    needed_until(in_present_era(stored.record, moment))
    records.is_held(stored.record, moment)


class EndedWorker:
    """A worker that has ended, before the event loop has heard of that."""

    def attach(self, on_end: Any) -> None:
        pass

    def detach(self, on_end: Any) -> bool:
        return False

    def submit(self, job: Any) -> None:
        raise LinkError(Failure.CLOSED)


async def test_connection_that_refuses_a_request_is_not_used_again() -> None:
    """Otherwise a caller that asks again and again, and keeps the event loop busy, would never reach the node."""
    link = AsyncWorkerLink(cast(Any, EndedWorker()))

    with pytest.raises(LinkError):
        link.send(acquire("a"), {}, lambda reply: True)

    assert link.broken
