"""Records that change by compare and set: the clock of a leader that may change, and the groups that fit in a write."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from django_redlock.core.protocol import (
    POSITIVE,
    Acquire,
    Extend,
    Extended,
    Kind,
    Release,
    Reply,
    Request,
    Survey,
    Term,
)
from django_redlock.nodes.base import LinkError
from django_redlock.nodes.records import record as records
from django_redlock.nodes.records import table
from django_redlock.nodes.records.clock import RATE, Era, EraClock, Moment
from django_redlock.nodes.records.record import Decision, Stored, in_present_era, needed_until, parsed
from django_redlock.nodes.records.table import RecordTable, UntouchedError, batches, chunked

NOW = 1_700_000_000_000_000
TTL = 30.0


def acquire(secret: str, *names: str, **changed: Any) -> Acquire:
    slugs = tuple("{" + name + "}" for name in names or ("x",))
    return Acquire(slugs, secret * 32, secret * 32 + "{}", TTL, NOW, 3600.0, 1e9)._replace(**changed)


def release(secret: str, *names: str, tombstone: float = 0.0) -> Release:
    return Release(tuple("{" + name + "}" for name in names or ("x",)), secret * 32, tombstone)


# The interval clock


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_bounds_of_a_clock_grow_apart_with_time():
    """After ten seconds without a reading, each bound has moved by the drift that two clocks may have."""
    here = Clock()
    clock = EraClock(here)
    here.now += 0.2
    clock.observe(Era("a"), 5.0, 6.0, sent=1000.0)

    assert clock.bounds() == pytest.approx((5.0, 6.2 + 0.2 * RATE))
    here.now += 10.0
    assert clock.bounds() == pytest.approx((15.0 - 10 * RATE, 16.2 + 10.2 * RATE))


def test_readings_in_whole_seconds_narrow_the_bounds():
    """A store that counts whole seconds is known to a few milliseconds after some readings."""
    here, clock = Clock(), None
    clock = EraClock(here)
    for _ in range(40):
        here.now += 0.37
        shown = int(here.now - 990.123)
        clock.observe(Era("a"), shown, shown + 1.0, sent=here.now)

    low, high = clock.bounds()
    assert low <= here.now - 990.123 <= high
    assert high - low < 0.1


def test_clock_that_was_set_begins_another_era():
    """No hold is compared with a clock that jumped; whoever notices has everything counted anew."""
    here = Clock()
    clock, era = EraClock(here), Era("a", first=0.0)
    clock.observe(era, 5.0, 5.0, sent=here.now)
    assert clock.correction(era, "a") is None

    clock.observe(era, 65.0, 65.0, sent=here.now)

    assert clock.correction(era, "a") == Era("a", 1)


def test_era_begins_when_its_record_is_there():
    """The first reading counts only if it was taken after the record, and the record of another leader is replaced."""
    here = Clock()
    clock = EraClock(here)

    assert clock.correction(None, "a", "lease") == Era("a", source="lease")
    assert clock.correction(Era("b", 3, 9.0), "a") == Era("a")
    assert clock.correction(Era("a"), "a") is None
    assert clock.moment(Era("a")) is None
    clock.observe(Era("a"), 5.0, 6.0, sent=here.now)
    corrected = clock.correction(Era("a"), "a")
    assert corrected == Era("a", first=6.0)
    assert clock.moment(corrected) == Moment(5.0, 6.0, "a/0", 6.0)
    assert Era.load(corrected.dump()) == corrected
    assert Era.load({"name": 1}) is None


def test_record_from_the_future_begins_another_era():
    """The clock was set back before this process knew it, or the era is that of a restored backup."""
    here = Clock()
    clock, era = EraClock(here), Era("a", first=0.0)
    clock.observe(era, 5.0, 6.0, sent=here.now)
    moment = clock.moment(era)
    assert moment is not None
    records = [{"era": "a/0", "written": 6.0}, {"era": "b/0", "written": 900.0}, {"era": "a/0"}, {}]
    assert clock.check(moment, records)
    assert clock.correction(era, "a") is None

    assert not clock.check(moment, [{"era": "a/0", "written": 7.0}])

    assert clock.correction(era, "a") == Era("a", 1)


def test_hold_of_an_earlier_era_counts_from_the_beginning_of_this_one():
    """The time left at the write counts again from the first reading on; other fields stay."""
    record = {
        "slug": "{x}",
        "holder": ["v", 140.0],
        "fence": [7, None],
        "sharers": {"n": 120.0},
        "queue": {"p|1": [5, 103.0]},
        "until": 101.0,
        "era": "a/0",
        "written": 100.0,
    }
    moment = Moment(2.0, 2.1, "b/0", 1.5)

    moved = in_present_era(record, moment)

    assert moved["holder"] == ["v", 41.5]
    assert moved["fence"] == [7, None]
    assert moved["sharers"] == {"n": 21.5}
    assert moved["queue"] == {"p|1": [5, 4.5]}
    assert moved["until"] == 2.5
    assert in_present_era(record, moment._replace(era="a/0")) is record
    assert needed_until(record) is None
    assert needed_until(record | {"fence": [7, 99.0]}) == 140.0


# A store in memory whose leaders change


class World:
    """A store in which no time passes, with one leader after another."""

    def __init__(self) -> None:
        self.records: dict[str, tuple[int, str]] = {}
        self.version = 0
        self.term = 1

    def elect(self) -> None:
        self.term += 1


class Table(RecordTable):
    """The records of such a store, read by one client."""

    errors = (ConnectionError,)

    def __init__(self, world: World, most: int = 1000) -> None:
        super().__init__(1.0)
        self.world = world
        self.hinder: Callable[[], None] = lambda: None
        self.most = self.part = most  # type: ignore[misc]
        self.written: list[int] = []

    def now(self) -> float:
        return 0.0

    def pause(self, longest: float = table.PAUSE) -> None:
        pass

    def ready(self) -> None:
        pass

    def key(self, kind: str, name: str) -> str:
        return f"{kind}/{name}"

    def read(self, keys: Sequence[str]) -> tuple[Moment, dict[str, Stored]]:
        self._term = self.world.term
        found = {key: self.world.records[key] for key in keys if key in self.world.records}
        stored = {key: Stored(version, json.loads(text)) for key, (version, text) in found.items()}
        return Moment(0.0, 0.0, str(self._term), 0.0), stored

    def write(self, decision: Decision) -> bool | None:
        self.hinder()
        records = self.world.records
        if any(records.get(change.key, (None, ""))[0] != change.version for change in decision.changes):
            return False
        for change in decision.changes:
            self.world.version += 1
            records[change.key] = (self.world.version, json.dumps(change.record))
        self.written.append(len(decision.changes))
        return True if self.world.term == self._term else None

    def survey(self, request: Survey) -> Reply:
        return self.look_up(request)


def test_vote_does_not_count_if_the_leader_changes_meanwhile():
    """The record may have been written, so the outcome is unknown; a release is final under any leader."""
    world = World()
    client = Table(world)
    client.execute([acquire("b", "y")])
    client.hinder = once(world.elect)
    (unclear,) = client.execute([acquire("a")])
    client.hinder = once(world.elect)
    (released,) = client.execute([release("a")])

    assert (unclear.kind, unclear.detail) == (Kind.UNKNOWN, "has changed its leader")
    assert released.kind is Kind.RELEASED


def once(do: Callable[[], None]) -> Callable[[], None]:
    left = [do]
    return lambda: left.pop()() if left else None


def test_replies_have_no_time_and_tokens_are_bounded_by_the_client():
    """An election is not taken for a step of the clock, and an absurd token is not accepted."""
    world = World()
    client = Table(world)
    (reply,) = client.execute([acquire("a")])
    (far,) = client.execute([acquire("a", number=2**52, ahead=60.0)])
    (listed,) = client.execute([Survey(("{x}",))])

    assert (reply.kind, reply.time, reply.fence) == (Kind.ACCEPTED, 0, NOW)
    assert (far.kind, far.fence) == (Kind.GRANTED, NOW)
    assert (listed.time, listed.rows[0].fence) == (0, NOW)


def test_release_is_written_before_an_earlier_grant():
    """A release with a tombstone changes the record of the name, so a grant decided before it is not written."""
    world = World()
    late, other = Table(world), Table(world)
    other.execute([Survey(("{x}",))])
    late.execute([Survey(("{x}",))])
    late.hinder = once(lambda: other.execute([release("a", tombstone=60.0)]) and None)
    (reply,) = late.execute([acquire("a")])

    assert reply.kind is Kind.CANCELLED


# Groups that fit in one write


def test_extension_of_many_leases_is_written_in_groups():
    """Each lease has its own outcome, in the order of the request; a lease with very many names is one."""
    world = World()
    client = Table(world, most=10)
    many = tuple(f"{{n{number}}}" for number in range(25))
    client.execute([acquire("a", *(slug[1:-1] for slug in many))])
    client.execute([acquire("b", *(f"m{number}" for number in range(7)))])
    terms = [Term((f"{{m{number}}}",), "b" * 32, "b" * 32, TTL, NOW) for number in range(7)]
    lost = Term(("{x}",), "c" * 32, "c" * 32, TTL, -1)
    extension = Extend((*terms, Term(many, "a" * 32, "a" * 32, TTL, NOW), lost, *terms), None)
    (reply,) = client.execute([extension])

    held = Extended(Kind.HELD, NOW)
    assert reply.kind is Kind.MIXED
    assert reply.terms == (*[held] * 8, Extended(Kind.REFUSED, 0), *[held] * 7)


def test_groups_of_requests():
    """Groups hold as many requests as fit, in their order; no group is empty."""
    small: list[Request] = [acquire("a"), acquire("b"), acquire("c")]

    assert [len(batch) for batch in batches(small, 10, 4)] == [2, 1]
    assert list(batches([], 10, 4)) == []
    assert chunked(small[0], 1) == [small[0]]
    term = Term(("{x}", "{y}"), "a" * 32, "v", TTL, 1)
    assert [len(one.terms) for one in chunked(Extend((term,) * 3, None), 4) if isinstance(one, Extend)] == [2, 1]


def test_store_that_breaks_between_two_groups_leaves_an_unknown_outcome():
    """The first group has been written, so the request may have been carried out."""
    world = World()
    client = Table(world, most=10)

    def breaks() -> None:
        if len(client.written) == 1:
            raise UntouchedError(LinkError(table.Failure.RESET).failure)

    client.execute([Survey(("{x}",))])
    client.ready = breaks  # type: ignore[method-assign]
    with pytest.raises(LinkError) as unclear:
        client.execute([acquire("a", *(f"n{number}" for number in range(25)))])

    assert not isinstance(unclear.value, UntouchedError)


# Records that another program changed

FOREIGN: list[Any] = [
    5,
    [],
    {"holder": 5},
    {"holder": ["x"]},
    {"holder": ["x", "y"]},
    {"holder": ["x", 10**400]},
    {"holder": ["x", float("nan")]},
    {"sharers": 3},
    {"holder": ["0" * 32, 5.0], "sharers": {"a": "b"}},
    {"queue": 5},
    {"queue": {"a": 3}},
    {"queue": {"a": ["x", "y"]}},
    {"fence": ["a", 1]},
    {"fence": [1]},
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
