"""Held locks: states, remaining time, stale keys and release by force, over nodes in memory and real ones."""

import json
import math
import time
from dataclasses import replace

import pytest
from django.conf import settings
from django.test import override_settings

from django_redlock import LockManager, QuorumUnavailableError, lock, locks
from django_redlock.core.names import counted
from django_redlock.inventory import (
    MAX_NAMES,
    PAGE,
    Snapshot,
    Staleness,
    State,
    find_lock,
    force_release,
    held_in_each,
    held_locks,
    stale_keys,
)
from django_redlock.inventory.doctor import diagnose
from django_redlock.inventory.model import LAST_SECOND
from django_redlock.models import HeldLock
from tests.held import A, B, nodes_in_memory, note_rounds, put_each, run, shown, value
from tests.managers import stop_time


@pytest.fixture
def five(five):
    """Five nodes in memory, for which no time passes."""
    stop_time(locks["default"])
    return five


def only(snapshot: Snapshot):
    assert len(snapshot.locks) == 1
    return snapshot.locks[0]


def reasons() -> list[Staleness]:
    """Return why keys are stale now."""
    return [key.reason for key in stale_keys(held_locks())]


# Listing


@pytest.mark.parametrize(
    ("lefts", "others", "state", "remaining"),
    [
        ([29, 28, 12, 5], [99], State.DEGRADED, 12 - 0.302),
        ([None, 20, 19, 18, 17], [], State.HELD, 19 - 0.302),
        ([None] * 5, [], State.NO_EXPIRY, None),
        ([20, 20], [], State.PARTIAL, None),
        ([20, 20], [20, 20], State.SPLIT, None),
    ],
)
def test_the_remaining_time_is_what_a_quorum_grants(five, lefts, others, state, remaining):
    """It is the quorum-th largest of the majority, minus drift; with fewer nodes a lock is partial or split."""
    put_each(five, value(A), *lefts)
    put_each(five[len(lefts) :], value(B), *others)
    put_each(five, value(), -1, -1, -1, name="gone")

    found = only(held_locks())

    assert (found.state, found.votes) == (state, len(lefts))
    assert found.remaining == (remaining and pytest.approx(remaining))
    holding = [view.node for view in found.views if view.fingerprint == shown(A)]
    assert holding == [node.name for node in five[: len(lefts)]]


def test_a_node_that_may_not_vote_is_named(five, monkeypatch):
    """A node that answers but gives no vote is in the banner with the reason, and reduces how many may fail."""
    manager = locks["default"]
    monkeypatch.setattr(manager.driver.admission, "objection", lambda node: "may evict keys" if node == 0 else "")

    snapshot = held_locks()

    assert snapshot.trouble == "n0 (may evict keys)"
    assert snapshot.quorum == "5 of 5 nodes answer; 3 needed. 1 more may fail."


def test_a_name_that_one_index_lost_is_asked_for_by_name(five):
    """A key that a node holds but no longer lists still counts, because the other nodes name it."""
    put_each(five, value(), 20, 20, 20, 20, 20)
    five[0].store.records.index.clear()

    assert only(held_locks()).votes == 5


def test_listing_is_bounded(five, monkeypatch):
    """A listing requests pages of bounded size, up to a bound that a caller with time may change, and reports more."""
    asked = []
    survey = LockManager.survey
    monkeypatch.setattr(LockManager, "survey", lambda self, **how: asked.append(how) or survey(self, **how))
    for number in range(MAX_NAMES + 2 * PAGE):
        put_each(five, value(), *[200] * 5, name=f"n{number}")

    snapshot = held_locks(seconds=60)

    assert (len(snapshot.locks), snapshot.complete) == (MAX_NAMES, False)
    assert {how["count"] for how in asked} == {PAGE}
    assert len(asked) == MAX_NAMES // PAGE + 1  # one of them is for locks that never end
    assert len(held_locks(limit=10 * MAX_NAMES, seconds=60).locks) == MAX_NAMES + 2 * PAGE
    assert len(held_locks(limit=PAGE, seconds=60).locks) == PAGE


@pytest.mark.parametrize(
    "text",
    [
        "",
        A + json.dumps({**dict.fromkeys(("host", "kind", "label", "ref"), ""), "pid": 1, "since": 1e300, "ttl": 1e300}),
        value(age=float("nan"), ttl=float("inf")),
        value() + " and more",
        value(age=time.time() - 253402300798.0),  # which other time zones could not show
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_anything_may_be_in_a_key(five, text):
    """Any foreign value in a key is listed without an error or an owner, with times that can be shown."""
    put_each(five, text, 20, 20, 20, 20, 20)

    found = only(held_locks())

    assert found.state == State.HELD
    assert found.since is None
    assert found.remaining is not None


def test_a_free_name_and_too_few_nodes_are_different(five):
    """A free lock is None; too few nodes to tell raise an error that names them."""
    assert find_lock("orders:7") is None

    for node in five[:3]:
        node.down = True

    with pytest.raises(QuorumUnavailableError, match=r"orders:7.*n0"):
        find_lock("orders:7")


# Stale keys


@pytest.mark.parametrize(
    ("text", "lefts", "expected"),
    [
        (value(age=100), [None] * 5, ["no_expiry"]),
        (value(age=100), [1000] * 5, ["too_long"]),
        (value(age=100, ttl=3600), [3500] * 5, []),  # a slot of a task, written with a ttl beyond max_ttl
        (value(age=100), [10, 10], ["residue"]),
        (value(age=1), [29, 29], []),  # an attempt in progress
        (value(age=100), [25, 25], []),  # its holder renews it, and is about to restore it elsewhere
        (value(age=100)[:-1] + ',"extensions":1}', [10, 10], []),  # nobody knows when it was extended last
        ("hello", [50, 50], ["foreign"]),
        ("", [50, 50], ["wrong_type"]),
    ],
)
def test_what_is_stale(five, text, lefts, expected):
    """A key that never ends, ends too late, or is foreign or old on too few nodes is stale if its holder is gone."""
    put_each(five, text, *lefts)

    assert reasons() == expected


@pytest.mark.parametrize(("accepted", "found"), [(1.0, []), (100.0, [Staleness.NO_EXPIRY])])
def test_a_slow_clock_does_not_make_a_lock_stale(five, accepted, found):
    """By a holder's clock that is 99 s slow its lease has ended; the nodes' clocks, as in its token, count."""
    put_each(five, value(age=100.0), None, None, None, None, None)
    snapshot = held_locks()
    views = [view._replace(fence=int((time.time() - accepted) * 1e6)) for view in only(snapshot).views]

    accepting = replace(snapshot, locks=(only(snapshot)._replace(views=tuple(views)),))
    assert [key.reason for key in stale_keys(accepting)] == found


def test_what_a_majority_has_or_may_have_is_not_stale(five):
    """A quorum's lock is not stale, nor is a minority that nodes that are down may make a quorum."""
    put_each(five, value(A, age=100), 3, 3, 3)
    put_each(five[3:], value(B, age=100), 3, None)

    assert [key.fingerprint for key in stale_keys(held_locks())] == [shown(B)]
    five[0].down = True
    assert shown(A) not in [key.fingerprint for key in stale_keys(held_locks())]


# Release by force
def test_release_by_force_ends_the_lease(five):
    """The holder's renewal is refused, its lease is lost, and the next holder has a higher token and keeps the lock."""
    lease = lock("orders:7", ttl=30, renew=False).acquire()

    outcome = force_release("orders:7", shown(lease))

    assert outcome == "released"
    assert lease.extend() is False
    assert (lease.valid(), lease.reason) == (False, "revoked")
    assert find_lock("orders:7") is None
    with lock("orders:7", wait=0) as later:
        assert later.fencing_token > lease.fencing_token
        assert force_release("orders:7", shown(lease)) == "changed"
        assert later.extend()


def test_a_slot_that_nothing_renews_can_be_taken_again_with_its_token(five):
    """After a slot beyond max_ttl was released by force, a caller with its token is not refused."""
    manager = locks["default"]
    manager.on_behalf("slot", ttl=3600, secret=A, detached=True).acquire()

    assert force_release("slot", shown(A)) == "released"

    assert manager.on_behalf("slot", ttl=30, secret=A, wait=0).acquire().release() == "released"


# Which nodes are asked, and for how long
def test_a_listing_without_time_has_locks_that_never_end(five, monkeypatch):
    """They come last in the indexes and need attention, so they are asked for first, also one that some nodes lack."""
    for number in range(3 * PAGE):
        put_each(five, value(), *[200] * 5, name=f"n{number}")
    put_each(five, value(), None, None, None, None, None, name="everywhere")
    put_each(five[:4], value(), None, None, None, None, name="on four")
    take_time(monkeypatch, 7.0)

    snapshot = held_locks(seconds=0)

    assert not snapshot.complete
    assert {"everywhere", "on four"} <= {held.name for held in snapshot.locks if held.state is State.NO_EXPIRY}


def test_a_silent_node_is_not_asked_again(five, monkeypatch):
    for number in range(3 * PAGE):
        put_each(five, value(), 20, 20, 20, 20, 20, name=f"n{number}")
    five[2].down = True
    asked: list[set[int]] = []
    ask = locks["default"].driver.ask
    monkeypatch.setattr(locks["default"].driver, "ask", lambda round: asked.append(set(round.requests)) or ask(round))

    held_locks(seconds=60)

    assert asked[0] == {0, 1, 2, 3, 4}
    assert all(nodes == {0, 1, 3, 4} for nodes in asked[1:])
    assert len(asked) >= 4


def test_the_wait_for_a_silent_node_takes_no_time_from_the_others(five, monkeypatch):
    """It may be longer than a listing may take; the list is complete all the same, and knows which lock is orphaned."""
    put_each(five, value(age=60, ttl=60.0, process="gone"), 20, 20, 20, 20, 20)
    put_each(five[3:], value(B), 20, 20, name="on two")
    five[2].down = True
    take_time(monkeypatch, 7.0, rounds=1)

    snapshot = held_locks(seconds=0.5)

    assert snapshot.complete
    assert {held.name: held.state for held in snapshot.locks} == {"orders:7": "orphaned", "on two": "partial"}


@pytest.mark.parametrize(
    ("part", "text"), [("process", "\ud800"), ("process", "x" * 10_000), ("ref", "\ud800"), ("label", "\udfff" * 9)]
)
def test_texts_that_no_request_can_carry(five, part, text):
    """A text that UTF-8 cannot encode, or that is longer than any of ours, is left out, and hides no other lock."""
    put_each(five, value(age=60, ttl=60.0, **{part: text}), 20)
    put_each(five, value(B), 20, 20, 20, 20, 20, name="orders:8")

    listed = held_locks()

    assert {held.name: (held.process, getattr(held.owner, part)) for held in listed.locks if held.votes == 1} == {
        "orders:7": ("", "")
    }
    assert [held.name for held in listed.locks if held.state is State.HELD] == ["orders:8"]


def test_commands_in_remedies_can_be_typed():
    """The doctor quotes an alias for the shell."""
    with override_settings(REDLOCK={"our locks": {"NODES": ["memory://a"]}}):
        put_each(locks["our locks"].nodes, "hello", None)
        remedies = [found.remedy for found in diagnose("our locks").findings if found.id == "stale-key"]

    assert [remedy.partition(";")[0] for remedy in remedies] == ["manage.py redlock_clear --using 'our locks'"]


def test_numbers_beyond_every_calendar(five):
    """A lock that stays taken for longer than any calendar is shown with its last day; other numbers become unknown."""
    text = counted(value(state="held", pid=10**4000), 10**4000)
    put_each(five, text, *[1e12] * 5)

    kept = only(held_locks())

    assert (kept.owner.pid, kept.extensions) == (0, 0)
    assert kept.kept_until == LAST_SECOND
    assert "held until 99" in HeldLock.of(kept).status  # in any time zone
    assert "held until 99" in run("redlock_list")[0]
    assert '"held_until": "9999-12-30' in run("redlock_list", "--format=json")[0]


@pytest.mark.parametrize(("timeout", "seconds", "patience"), [(5.0, 0.5, 0.75), (0.3, 0.5, 0.3), (5.0, 30.0, 5.0)])
def test_a_silent_node_holds_a_page_up_for_less_than_a_second(five, monkeypatch, timeout, seconds, patience):
    """A page waits for a silent node once, and for less than a second, even where a lock would wait for longer."""
    asked = note_rounds(monkeypatch)
    with nodes_in_memory(node_timeout=timeout):
        held_locks(seconds=seconds)

    assert {round.timeout for round in asked} == {patience}


def test_listings_at_once_have_the_time_of_all_of_them(five, monkeypatch):
    """They share a processor, so each may take longer; none waits longer for a silent node."""
    for number in range(3 * PAGE):
        put_each(five, value(), *[200] * 5, name=f"n{number}")
    take_time(monkeypatch, 7.0)
    more = {name: {"NODES": ["memory://a"], "OPTIONS": {"node_timeout": 5.0}} for name in ("other", "third")}

    alone = held_in_each(["default"], seconds=20)
    with nodes_in_memory(node_timeout=5.0) as nodes, override_settings(REDLOCK={**settings.REDLOCK, **more}):
        for number in range(3 * PAGE):
            put_each(nodes, value(), *[200] * 5, name=f"n{number}")
        take_time(monkeypatch, 7.0)
        asked = note_rounds(monkeypatch)
        together = held_in_each(["default", *more], seconds=20)
        held_in_each(["default", *more], seconds=0.5)

    assert [alone["default"].complete, *(each.complete for each in together.values())] == [False, True, True, True]
    assert {round.timeout for round in asked} == {5.0, 0.75}


def test_what_others_wrote_is_cut(five):
    """The description and the name of a holder are shown at most at the length that we would write."""
    owner = {**dict.fromkeys(("host", "kind", "label", "ref"), "x" * 1_000_000), "pid": 1, "since": 1.0, "ttl": 30.0}
    short = {**owner, **dict.fromkeys(("host", "kind", "label", "ref"), "x" * 400)}
    for node in five:
        node.store.put("{" + "n" * 1_000_000 + "}", A, 20)
        node.store.put("{" + "n" * 9_000 + "}", A + json.dumps(short), 20)
        node.store.put("{long}", A + json.dumps(owner), 20)

    named, long = sorted(held_locks().locks, key=lambda lock: lock.name, reverse=True)

    assert (len(str(named.owner)) < 500, len(named.holder) < 500) == (True, True)
    assert len(named.name) < 300
    assert (long.name, long.owner) == ("long", None)


def take_time(monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: float = math.inf) -> None:
    """Let each of the first rounds of questions take some time."""
    manager, clock = locks["default"], [1000.0]
    monkeypatch.setattr(manager, "runtime", replace(manager.runtime, clock=lambda: clock[0]))

    def slowly() -> None:
        clock[0] += seconds if len(asked) <= rounds else 0.0

    asked = note_rounds(monkeypatch, slowly)


def test_times_are_those_of_the_end_of_a_listing(five, monkeypatch):
    """The time of the listing itself is not added to that of locks on its first page; a lock that ended is left out."""
    put_each(five, value(), *[0.5] * 5, name="ends")
    for number in range(PAGE + 1):
        put_each(five, value(), 30, 30, 30, 30, 30, name=f"n{number}")
    take_time(monkeypatch, 7.0)

    listed = held_locks(seconds=60).locks

    assert {held.name for held in listed} == {f"n{number}" for number in range(PAGE + 1)}
    assert max(held.remaining for held in listed) < 30 - 7
    assert min(held.remaining for held in listed) < 30 - 21


@pytest.mark.parametrize(("left", "rounds"), [(0.5, 1), (0.5995, 2)], ids=["slow reply", "time rounded down"])
def test_lock_is_free_only_when_the_nodes_say_so(five, monkeypatch, left, rounds):
    """A reply may have left the node a moment ago, whatever it took; and nodes report whole milliseconds."""
    put_each(five, value(), *[left] * 5)
    take_time(monkeypatch, 0.6, rounds)

    found = find_lock("orders:7")

    assert found is not None
    assert found.remaining == 0.0


def test_what_could_not_be_asked_for_in_time_is_not_judged(five, monkeypatch):
    """Without the time to ask the other nodes for the names that some nodes reported, these are not called partial."""
    for number in range(PAGE):
        put_each(five[1:], value(), 10, 10, 10, 10, name=f"n{number}")
    for number in range(PAGE):
        put_each(five[:1], value(), 5, name=f"own{number}")
    take_time(monkeypatch, 7.0)

    snapshot = held_locks(seconds=0)

    assert snapshot.locks == ()
    assert not snapshot.complete
