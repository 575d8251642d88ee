"""Attempts, decided without clock, network or randomness."""

from collections.abc import Generator
from typing import Any

import pytest

from django_redlock.core.acquisition import Acquisition, GaveUp, Step
from django_redlock.core.attempt import Granted, HighestToken
from django_redlock.core.names import Owner, common_value, counted, encode
from django_redlock.core.protocol import ABSENT, NOBODYS, Extended, Failure, Instant, Kind, Release, Reply, Row, failed
from django_redlock.core.round import Round
from django_redlock.core.rules import QueuePlace, Rules, Wanted

NOW = 1_795_000_000_000_000


class Attempt:
    """Drives an acquisition step by step."""

    def __init__(
        self,
        nodes: int = 5,
        wait: float | None = 0.0,
        waiter: str = "",
        limit: int = 1,
        term: float = 10.0,
        hold_for: float = 0.0,
        place: QueuePlace | None = None,
        **options: Any,
    ) -> None:
        rules = Rules(nodes, **{"ttl": 10.0, **options})
        secrets = iter(f"{number:032x}" for number in range(1, 100))
        wanted = Wanted(("a",), term, wait, Owner(), limit=limit, hold_for=hold_for, place=place)
        acquisition = Acquisition(wanted, rules, HighestToken(), lambda: next(secrets), lambda: 0.5, waiter)
        self.time = 100.0
        self.steps: Generator[Step, Instant, Granted | GaveUp] = acquisition.steps(self._instant())
        self.step: Any = next(self.steps)

    def _instant(self) -> Instant:
        return Instant(self.time, NOW + round(self.time * 1e6))

    def reply(self, *kinds: Kind | str | None) -> None:
        """Give the round these replies, in the order of the nodes; a str is a busy node's holder, None is silence."""
        for node, kind in zip(list(self.step.requests), kinds, strict=False):
            if kind is None or self.step.closed:
                continue
            if isinstance(kind, str):
                self.step.receive(node, Reply(Kind.BUSY, left=5.0, detail=kind))
            else:
                number = self.step.requests[node].number if kind is Kind.ACCEPTED else 0
                self.step.receive(node, Reply(kind, number, left=5.0))

    def go_on(self, seconds: float = 0.0) -> Any:
        """Let time pass and take the next step; return it, or the outcome."""
        self.time += seconds
        try:
            self.step = self.steps.send(self._instant())
        except StopIteration as stop:
            return stop.value
        return self.step

    def proceed(self, seconds: float = 0.0) -> Any:
        """Do the same, and carry out the release of the attempt."""
        step = self.go_on(seconds)
        while isinstance(step, Round) and step.cleanup:
            step = self.go_on()
        return step


A, B, F, U = Kind.ACCEPTED, Kind.BUSY, Kind.FAILED, Kind.UNKNOWN


def test_token_is_not_small_where_the_nodes_know_none():
    """A client whose proposal is too high for them, and that hears of no token, uses the slowest clock that granted."""
    attempt = Attempt()
    for node, ahead in enumerate([2, 1, 3]):
        attempt.step.receive(node, Reply(Kind.GRANTED, 0, NOW + ahead * 1_000_000))

    second = attempt.go_on()

    assert {request.number for request in second.requests.values()} == {NOW + 1_000_000}
    attempt.reply(A, A, A)
    assert attempt.go_on().fencing_token == NOW + 1_000_000


def test_lock_that_the_nodes_do_not_keep_is_given_back():
    """
    A minimum hold longer than the lease is a request of its own, before the work begins. If too few nodes answer it,
    the work must not begin, because it might begin again too soon; nothing is left on any node, however late.
    """
    attempt = Attempt(3, hold_for=100.0)
    attempt.reply(A, A, A)

    keep = attempt.go_on(0.1)
    assert [term.ttl for term in keep.terms] == [100.0]
    keep.receive(0, Reply(Kind.HELD, terms=(Extended(Kind.HELD, 1),)))
    keep.receive(1, failed(Failure.TIMEOUT, U))
    keep.receive(2, failed(Failure.REFUSED))
    release = attempt.go_on(0.2)

    assert (set(release.requests), release.lasting) == ({0, 1, 2}, 100.0)
    assert all(request.secret == keep.terms[0].secret for request in release.requests.values())
    assert release.requests[1].tombstone
    outcome = attempt.go_on()
    assert isinstance(outcome, GaveUp)
    assert not outcome.taken


def test_minimum_hold_may_be_on_a_node_that_missed_the_first_request():
    """A node that failed then, and got the hold, has the lock for as long; so the release goes to all nodes."""
    attempt = Attempt(3, hold_for=100.0)
    attempt.reply(F, A, A)

    keep = attempt.go_on()
    for node in range(3):
        keep.receive(node, Reply(Kind.HELD, terms=(Extended(Kind.HELD, 1),)))
    granted = attempt.go_on()

    assert isinstance(granted, Granted)
    assert granted.untouched == frozenset()


@pytest.mark.parametrize(
    ("nodes", "replies", "taken"),
    [
        (5, [B, B, B], True),
        (5, [B, B, F, F, F], False),
        (5, [A, A, B, B, U], False),
        (5, [B, "b", "c", A, A], True),
        (4, [B, B, A, F], True),
        (2, [B, F], True),
        (1, [F], False),
        (3, ["b", "c", U], True),
    ],
)
def test_taken_and_cannot_tell_are_different_errors(nodes: int, replies: list[Kind | str], taken: bool):
    """An error that says "taken" needs so many busy nodes that the others are no quorum; a minority proves nothing."""
    attempt = Attempt(nodes)

    attempt.reply(*replies)
    outcome = attempt.proceed(0.1)
    while not isinstance(outcome, GaveUp):  # a split vote is repeated
        attempt.go_on(0.1)
        attempt.reply(*[replies[node] for node in attempt.step.requests])
        outcome = attempt.proceed(0.1)

    assert outcome.taken is taken


@pytest.mark.parametrize(("replies", "over"), [([B, B, None, B], True), ([B, B, F], False)])
def test_round_is_over_when_no_reply_can_change_its_outcome(replies: list[Kind | None], over: bool):
    """A quorum may be impossible while only the other nodes can tell whether the lock is taken."""
    attempt = Attempt()

    attempt.reply(*replies)

    assert attempt.step.closed is over


def test_tombstone_lasts_no_longer_than_a_lease_may():
    """The tombstone of a refused queue position is gone in a minute, even if the position would last an hour."""
    attempt = Attempt(term=3600.0, max_ttl=60.0)
    attempt.reply("x", "x", "x")

    undo = attempt.go_on()

    assert {node: request.tombstone for node, request in undo.requests.items()} == {3: 60.0, 4: 60.0}
    assert undo.lasting == 3600.0


def test_waiter_that_is_cut_off_leaves_the_queue():
    """A waiter that cannot reach a quorum must not be first in the queue on the nodes that it does reach."""
    attempt = Attempt(wait=None, waiter="p|1")
    attempt.step.receive(0, Reply(Kind.BUSY, left=30.0, detail="b", position=0))
    for node in range(1, 5):
        attempt.step.receive(node, failed(Failure.REFUSED))

    leaving = attempt.go_on()

    assert {node: request.leaving for node, request in leaving.requests.items()} == {0: "p|1"}


def test_holder_of_a_permit_waits_nowhere():
    """It leaves the queue of the node that refused it: as the first one there, it would keep out those behind it."""
    attempt = Attempt(3, wait=None, waiter="p|1", limit=2)
    attempt.step.receive(0, Reply(Kind.BUSY, left=30.0, detail="b", position=0))
    attempt.reply(None, A, "c")
    attempt.proceed()
    attempt.reply(None, A, A)

    leaving = attempt.go_on()

    assert {node: request.leaving for node, request in leaving.requests.items()} == {0: "p|1"}
    assert {request.secret for request in leaving.requests.values()} == {NOBODYS}  # no permit is given back
    assert isinstance(attempt.go_on(), Granted)


@pytest.mark.parametrize("late", [None, "c"])
def test_holder_that_was_away_waits_nowhere(late: str | None):
    """
    It leaves the queue of each node that did not grant the lock, or has not replied yet, at the first attempt.

    Its place there would last longer than a short run, and the next one would find it first in that queue.
    """
    attempt = Attempt(3, waiter="p|1", place=QueuePlace("p|1", NOW, 3.0))
    attempt.reply(late, A, A)

    leaving = attempt.go_on()

    assert {node: request.leaving for node, request in leaving.requests.items()} == {0: "p|1"}
    assert {request.secret for request in leaving.requests.values()} == {NOBODYS}
    assert isinstance(attempt.go_on(), Granted)


@pytest.mark.parametrize("free", [(), (3, 7)])
@pytest.mark.parametrize("holder", [common_value(60), "e" * 32, common_value(61)])
def test_lock_with_many_permits_asks_which_are_taken(holder: str, free: tuple[int, ...]):
    """
    A round for each would take longer than any caller was to wait; those that a quorum may have are tried.

    None is tried if the lock is held alone, or with another limit.
    """
    attempt = Attempt(limit=60)
    attempt.reply("b", "b", "b")
    attempt.proceed(0.05)
    base, *slugs = attempt.step.requests[0].slugs
    for node in range(3):
        lefts = [ABSENT if number in free and node else 5.0 for number in range(len(slugs))]
        rows = [Row(slug, "h" * 32, left, 0) for slug, left in zip(slugs, lefts, strict=True)]
        attempt.step.receive(node, Reply(Kind.LISTED, rows=(Row(base, holder, 5.0, 0), *rows)))

    asked = []
    free = free if holder == common_value(60) else ()
    for _ in free:
        attempt.proceed(0.05)
        asked += attempt.step.requests[0].slugs
        attempt.reply("b", "b", "b")
    outcome = attempt.proceed(0.05)

    assert asked == [slugs[number] for number in free]
    assert (base, len(slugs), outcome.taken, outcome.attempts) == ("{a}", 59, True, 1 + len(free))


def test_lock_with_permits_waits_no_longer_than_its_time():
    """Neither silent nor slow nodes are asked for one permit after the other."""
    silent, slow = Attempt(limit=60, node_timeout=0.2), Attempt(limit=3, node_timeout=0.2)
    silent.reply(F, F, F)
    assert silent.proceed(0.2).attempts == 1

    slow.reply("b", "b", "b")
    slow.proceed(0.19)
    slow.reply("b", "b", "b")
    assert slow.proceed(0.19).attempts == 2


def test_first_contender_gives_way_to_a_waiter():
    """A node that is free, but serves a waiter first, will not give its vote to this caller."""
    attempt = Attempt(nodes=3, wait=0.0)
    attempt.reply(A, encode("", Owner("host", 7, since=NOW / 1e6 + 200.0)), F)  # a later contender
    attempt.go_on(0.01)
    attempt.go_on(0.01)
    attempt.reply(A, Kind.QUEUED)

    undo = attempt.go_on(0.01)

    assert {type(request) for request in undo.requests.values()} == {Release}


def test_holder_that_one_node_did_not_extend_is_one_holder():
    """Stored values differ by the number of extensions; that is no split vote."""
    value = encode("", Owner("host", 7))
    attempt = Attempt(nodes=3, wait=0.0)
    attempt.reply(counted(value, 2), counted(value, 1), F)
    assert attempt.step.closed

    outcome = attempt.proceed()

    assert isinstance(outcome, GaveUp)
    assert (outcome.taken, outcome.attempts, outcome.holder) == (True, 1, value)


def test_floor_is_bounded():
    """Many names cost no unbounded memory; the oldest are forgotten."""
    highest = HighestToken(size=2)

    for number, name in enumerate("abc", 1):
        highest.lift([name], number)

    assert (highest.of("a"), highest.of("b"), highest.of("c")) == (0, 2, 3)


# Links that were cut, and failures that may pass


def test_only_one_repetition_follows():
    """A connection that is cut each time keeps nobody for longer than two attempts."""
    attempt = Attempt(nodes=1)
    for _ in range(2):
        attempt.step.receive(0, failed(Failure.FORGOT, Kind.UNKNOWN))
        attempt.go_on(0.1)

    outcome = attempt.proceed()

    assert (outcome.attempts, outcome.taken) == (2, False)


@pytest.mark.parametrize("wait", [60.0, None])
@pytest.mark.parametrize(
    ("failure", "at_once"), [(Failure.REPLICA, False), (Failure.READONLY, False), (Failure.WRONGPASS, True)]
)
def test_failure_that_may_pass_is_no_wrong_setting_until_it_has_lasted(
    failure: Failure, at_once: bool, wait: float | None
):
    """Whoever waits goes on until the time has passed, who waits for ever for ten seconds; the error then says so."""
    attempt = Attempt(nodes=1, wait=wait)
    began, step = attempt.time, attempt.step
    while not isinstance(step, GaveUp):
        attempt.step.receive(0, failed(failure))
        step = attempt.proceed(0.1)
        if not isinstance(step, GaveUp):
            step = attempt.go_on(step.seconds + 0.5)

    took = attempt.time - began
    assert took < 0.5 if at_once else (60.0 if wait else 10.0) <= took < (62.0 if wait else 12.0)
    assert step.misconfigured


def test_failure_that_passed_in_between_begins_anew():
    """Ten seconds of the same answer count, not two answers that are ten seconds apart."""
    attempt = Attempt(nodes=1, wait=30.0)
    step, number = attempt.step, 0
    while not isinstance(step, GaveUp):
        attempt.step.receive(0, failed(Failure.TIMEOUT if number % 2 else Failure.REPLICA))
        step, number = attempt.proceed(0.1), number + 1
        step = step if isinstance(step, GaveUp) else attempt.go_on(step.seconds + 4.0)

    assert not step.misconfigured
