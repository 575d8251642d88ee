"""Attempts, decided without clock, network or randomness."""

from collections.abc import Callable, Generator
from typing import Any

import pytest

from django_redlock.core.acquisition import Acquisition, GaveUp, Pause, Step, Waiter
from django_redlock.core.attempt import Granted, HighestToken
from django_redlock.core.names import Owner, counted, encode
from django_redlock.core.protocol import ABSENT, Acquire, Failure, Instant, Kind, Raise, Release, Reply, Row, failed
from django_redlock.core.round import Round
from django_redlock.core.rules import Rules, Wanted

NOW = 1_795_000_000_000_000


class Attempt:
    """Drives an acquisition step by step."""

    def __init__(
        self,
        nodes: int = 5,
        wait: float | None = 0.0,
        waiter: str = "",
        limit: int = 1,
        secret: str = "",
        term: float = 10.0,
        **options: Any,
    ) -> None:
        rules = Rules(nodes, **{"ttl": 10.0, **options})
        secrets = iter(f"{number:032x}" for number in range(1, 100))
        wanted = Wanted(("a",), term, wait, Owner(), secret, limit=limit)
        self.highest = HighestToken()
        self.acquisition = Acquisition(wanted, rules, self.highest, lambda: next(secrets), lambda: 0.5, waiter)
        self.time = 100.0
        self.steps: Generator[Step, Instant, Granted | GaveUp] = self.acquisition.steps(self._instant())
        self.step: Any = next(self.steps)

    def _instant(self) -> Instant:
        return Instant(self.time, NOW + round(self.time * 1e6))

    def reply(self, *kinds: Kind | str | None, fence: int = 0, left: float = 5.0) -> None:
        """Give the round these replies, in the order of the nodes; a str is a busy node's holder, None is silence."""
        for node, kind in zip(list(self.step.requests), kinds, strict=False):
            if kind is None or self.step.closed:
                continue
            if isinstance(kind, str):
                self.step.receive(node, Reply(Kind.BUSY, fence, left=left, detail=kind))
                continue
            number = getattr(self.step.requests[node], "number", 0) if kind is Kind.ACCEPTED else fence
            self.step.receive(node, Reply(kind, number, left=left))

    def queue(self, *nodes: int, place: int = 0) -> None:
        """Let these nodes refuse the waiter and queue it."""
        for node in nodes:
            self.step.receive(node, Reply(Kind.BUSY, left=30.0, detail="b", position=place))

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


A, G, B, F, U = Kind.ACCEPTED, Kind.GRANTED, Kind.BUSY, Kind.FAILED, Kind.UNKNOWN


def test_quorum_that_accepted_the_token_is_enough():
    """One round, five requests, and the proposed number is the token."""
    attempt = Attempt()
    request = attempt.step.requests[0]

    attempt.reply(A, None, A, None, A)

    outcome = attempt.go_on(0.1)
    assert attempt.step.closed
    assert isinstance(request, Acquire)
    assert list(attempt.step.requests) == [0, 1, 2, 3, 4]
    assert outcome.fencing_token == request.number == NOW + 100_000_000
    assert outcome.deadline == pytest.approx(100.0 + 10.0 - 0.102)


def test_validity_counts_from_before_the_first_byte():
    """A quorum whose replies are read late has no validity left, and is released."""
    attempt = Attempt()
    attempt.reply(A, A, A)

    undo = attempt.go_on(8.0)

    assert {type(request) for request in undo.requests.values()} == {Release}
    assert isinstance(attempt.go_on(), GaveUp)


def test_token_that_was_too_low_is_raised_in_a_second_round():
    """Granted but not accepted costs one more round, to the nodes that granted, above every number they have seen."""
    attempt = Attempt()
    attempt.reply(G, G, G, fence=NOW * 2)

    second = attempt.go_on()

    assert isinstance(second, Round)
    assert list(second.requests) == [0, 1, 2]
    assert second.requests[0] == Raise(("{a}",), f"{1:032x}", NOW * 2 + 1, 3600.0)
    attempt.reply(A, A, A)
    assert attempt.go_on().fencing_token == NOW * 2 + 1


def test_token_is_not_small_where_the_nodes_know_none():
    """A client whose proposal is too high for them, and that hears of no token, uses the slowest clock that granted."""
    attempt = Attempt()
    for node, ahead in enumerate([2, 1, 3]):
        attempt.step.receive(node, Reply(G, 0, NOW + ahead * 1_000_000))

    second = attempt.go_on()

    assert {request.number for request in second.requests.values()} == {NOW + 1_000_000}
    attempt.reply(A, A, A)
    assert attempt.go_on().fencing_token == NOW + 1_000_000


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


def test_failure_is_certain_before_all_have_answered():
    """Nothing waits for a node that cannot change the result."""
    attempt = Attempt()

    attempt.reply(B, B, None, B)

    assert attempt.step.closed


def test_two_busy_and_one_silent_node_wait_for_the_others():
    """The outcome is a failure, but only the other nodes can tell whether it is taken."""
    attempt = Attempt()

    attempt.reply(B, B, F)

    assert not attempt.step.closed


def test_tombstone_lasts_no_longer_than_a_lease_may():
    """The tombstone of a refused queue position is gone in a minute, even if the position would last an hour."""
    attempt = Attempt(term=3600.0, max_ttl=60.0)
    attempt.reply("x", "x", "x")

    undo = attempt.go_on()

    assert {node: request.tombstone for node, request in undo.requests.items()} == {3: 60.0, 4: 60.0}
    assert undo.lasting == 3600.0


def test_node_that_never_got_the_request_is_known():
    """The node needs no release, unless it has queued the waiter or has a key of an earlier hold."""
    once = Attempt()
    once.reply(F, U, A, A, A)
    assert once.go_on().untouched == {0}

    again = Attempt(wait=None, waiter="w|1")
    again.reply("h", F, "h", "h")
    again.queue(0, 2, 3)
    again.proceed()
    again.go_on(1.0)
    again.reply(F, F, A, A, A)
    assert again.go_on().untouched == {1}

    before = Attempt(secret="a" * 32)
    before.reply(F, F, A, A, A)
    assert before.go_on().untouched == set()


def test_number_is_above_everything_seen():
    """Numbers in refusals count too, so a waiter needs no second round when its turn comes."""
    attempt = Attempt(wait=None)
    attempt.reply(B, B, B, fence=NOW * 2)
    attempt.proceed()

    attempt.go_on()

    assert attempt.step.requests[0].number == NOW * 2 + 1


def test_late_reply_still_teaches_the_floor():
    """A reply after the round was decided changes no vote, but its number is remembered."""
    attempt = Attempt()
    round = attempt.step
    attempt.reply(A, A, A)

    round.receive(4, Reply(Kind.GRANTED, NOW * 2))

    assert 4 not in round.replies
    assert attempt.highest.of(["{a}"]) == NOW * 2


@pytest.mark.parametrize(("left", "notified"), [(9.0, 1.01), (0.001, 0.03)])
def test_waiter_pauses_no_longer_than_the_hold_can_last(left: float, notified: float):
    """A waiter asks again when expiry can free a quorum; with notifications, once a second is enough."""
    attempt = Attempt(wait=None)
    attempt.reply(B, B, B, left=left)

    pause = attempt.proceed()

    assert isinstance(pause, Pause)
    assert 0.01 < pause.seconds <= pause.notified <= notified + 1e-9


@pytest.mark.parametrize(("place", "seconds"), [(0, 0.025), (9, 0.475), (400, 1.01)])
def test_waiter_without_notifications_asks_the_sooner_the_nearer_its_turn(place: int, seconds: float):
    """Without notifications the first waiter asks most often."""
    attempt = Attempt(wait=None)
    attempt.queue(0, 1, 2, place=place)

    assert attempt.proceed().seconds == pytest.approx(seconds)


def test_waiter_leaves_the_queue_when_it_gives_up():
    """Every node that may have queued it gets a release."""
    attempt = Attempt(wait=1.0, waiter="p|1")
    attempt.queue(0, 1)
    attempt.step.close()

    leaving = attempt.go_on(2.0)

    assert {node: request.leaving for node, request in leaving.requests.items()} == dict.fromkeys(range(5), "p|1")


def test_interrupted_attempt_is_undone_on_all_nodes():
    """Nobody knows how far the round came, so undoing it goes to all of its nodes, and leaves the queues."""
    attempt = Attempt(wait=3.0, waiter="p|1")
    attempt.step.receive(0, Reply(A))
    attempt.queue(1, 2, 3)

    attempt.steps.close()
    undo = attempt.acquisition.undo()

    assert undo.requests == {
        node: Release(("{a}",), f"{1:032x}", 10.0 if node == 4 else 0.0, "p|1") for node in range(5)
    }


def test_waiter_stays_queued_between_two_attempts():
    """A waiter releases grants of a minority, and stays queued there and everywhere."""
    attempt = Attempt(wait=None, waiter="p|1")
    attempt.step.receive(0, Reply(A))
    attempt.queue(*range(1, 4))

    back = attempt.go_on()

    assert {node: request.leaving for node, request in back.requests.items()} == {0: "", 4: ""}


@pytest.mark.parametrize(("waiter", "hears"), [("p|1", True), ("", False)])
def test_waiter_waits_briefly_for_nodes_that_have_not_refused_it_yet(waiter: str, hears: bool):
    """A node whose refusal came last has nothing to release; a caller that does not wait gets its result at once."""
    attempt = Attempt(wait=None, waiter=waiter)
    attempt.queue(*range(3))
    assert (attempt.step.closed, attempt.step.unheard) == (True, hears)

    attempt.queue(3, 4)

    assert not attempt.step.unheard
    assert isinstance(attempt.go_on(), Pause)


def test_waiter_that_is_cut_off_leaves_the_queue():
    """A waiter that cannot reach a quorum must not be first in the queue on the nodes that it does reach."""
    attempt = Attempt(wait=None, waiter="p|1")
    attempt.queue(0)
    for node in range(1, 5):
        attempt.step.receive(node, failed(Failure.REFUSED))

    leaving = attempt.go_on()

    assert {node: request.leaving for node, request in leaving.requests.items()} == {0: "p|1"}


def test_waiter_acts_on_notifications_from_a_quorum_of_nodes():
    """One node may notify because a waiter released a minority; acting on that would wake the next one."""
    waiter = Waiter("p|1", 3)

    assert [waiter.hear(node) for node in (0, 0, 4, 0, 2)] == [False, False, False, False, True]

    waiter.attend()
    assert not waiter.called


def test_waiter_is_not_notified_by_its_own_returned_grants():
    """Nodes that granted in vain would grant again, and notify it for that; it asks when one more node notifies."""
    waiter = Waiter("p|1", 3)

    waiter.gives_back({0, 1, 2})
    assert [waiter.hear(node) for node in (0, 1, 2, 3)] == [False, False, False, True]

    waiter.attend()
    waiter.gives_back({0})
    assert [waiter.hear(node) for node in (0, 3, 4)] == [False, False, True]


def test_grants_without_votes_are_followed_by_the_pause_of_a_contender():
    """Nobody notifies the first waiter that lacks only votes when there are some: it asks again soon."""
    attempt = Attempt(nodes=5, wait=None, waiter="p|1")
    attempt.reply(A, A, Kind.NO_VOTE, Kind.NO_VOTE)
    attempt.step.receive(4, Reply(Kind.QUEUED, position=1))

    pause = attempt.proceed(0.001)

    assert isinstance(pause, Pause)
    assert pause.seconds == pause.notified <= 0.5


def survey(attempt: Attempt, taken: Callable[[int, int], bool]) -> None:
    """Reply which permits are taken on which node."""
    request = attempt.step.requests[0]
    assert (request.waiters, len(request.slugs)) == (None, 59)
    for node in range(3):
        rows = (
            Row(slug, "h" * 32, 5.0 if taken(node, number) else ABSENT, 0) for number, slug in enumerate(request.slugs)
        )
        attempt.step.receive(node, Reply(Kind.LISTED, rows=tuple(rows)))


def test_lock_with_many_permits_asks_which_are_taken():
    """A round for each of them would take longer than any caller was to wait."""
    attempt = Attempt(limit=60)
    attempt.reply("b", "b", "b")
    attempt.proceed(0.05)

    survey(attempt, lambda node, number: True)

    outcome = attempt.proceed(0.05)
    assert (outcome.taken, outcome.attempts) == (True, 1)


def test_lock_with_many_permits_tries_those_that_a_quorum_may_have():
    """A permit that is taken on only a few nodes is worth a request."""
    attempt = Attempt(limit=60)
    attempt.reply("b", "b", "b")
    attempt.proceed(0.05)
    free = [attempt.step.requests[0].slugs[number] for number in (3, 7)]

    survey(attempt, lambda node, number: number not in (3, 7) or node == 0)

    asked = []
    for _ in range(2):
        attempt.proceed(0.05)
        asked += attempt.step.requests[0].slugs
        attempt.reply("b", "b", "b")
    assert asked == free
    assert attempt.proceed(0.05).attempts == 3


def test_lock_with_permits_waits_no_longer_than_its_time():
    """Neither silent nor slow nodes are asked for one permit after the other."""
    silent, slow = Attempt(limit=60, node_timeout=0.2), Attempt(limit=3, node_timeout=0.2)
    silent.reply(F, F, F)
    assert silent.proceed(0.2).attempts == 1

    slow.reply("b", "b", "b")
    slow.proceed(0.19)
    slow.reply("b", "b", "b")
    assert slow.proceed(0.19).attempts == 2


@pytest.mark.parametrize("replies", [["b", "b", "c", "c", A], ["b", "c", A, F, F], ["b", "b", "c", A, U]])
def test_later_contender_gives_back_what_it_has_and_asks_again(replies: list[Any]):
    """
    Contenders that share the nodes between them would otherwise all be refused, and nobody would hold the lock.
    It asks only the nodes that answered, for two node timeouts.
    """
    attempt = Attempt(wait=0.0, node_timeout=0.2)
    attempt.reply(*replies)

    undo = attempt.go_on(0.05)
    assert {type(request) for request in undo.requests.values()} == {Release}
    pause = attempt.go_on()
    assert isinstance(pause, Pause)
    assert pause.seconds <= 0.05
    again = attempt.go_on(0.3)
    assert list(again.requests) == [node for node, reply in enumerate(replies) if reply not in (F, U)]
    assert again.requests[0].secret != undo.requests[replies.index(A)].secret
    attempt.reply(*[reply for reply in replies if reply not in (F, U)])

    outcome = attempt.proceed(0.1)
    assert isinstance(outcome, GaveUp)
    assert outcome.attempts == 2


def contender(since: float) -> str:
    """Return the description of another contender that began at *since*."""
    return encode("", Owner("host", 7, since=since))


@pytest.mark.parametrize("replies", [[A, "1", U], [A, "1", F, F, A], [A, "1", "2", "1", A], [A, A, "1", "1"]])
def test_first_contender_keeps_what_it_has(replies: list[Any]):
    """It asks again under the secret that it used before, until the others have given theirs back."""
    began = NOW / 1e6 + 100.0
    replies = [contender(began + int(reply)) if isinstance(reply, str) else reply for reply in replies]
    answering = [reply for reply in replies if reply not in (F, U)]
    attempt = Attempt(nodes=len(replies), wait=0.0, node_timeout=0.2)
    before = attempt.step.requests[0]
    attempt.reply(*replies)

    for _ in range(3):
        pause = attempt.go_on(0.01)
        assert isinstance(pause, Pause)
        assert 0 < pause.seconds <= 0.05
        again = attempt.go_on(pause.seconds)
        assert list(again.requests) == [node for node, reply in enumerate(replies) if reply not in (F, U)]
        assert (again.requests[0].secret, again.requests[0].value) == (before.secret, before.value)
        attempt.reply(*answering)
    attempt.go_on(0.01)
    attempt.go_on(0.01)
    attempt.reply(*[A] * len(answering))

    outcome = attempt.go_on(0.01)
    assert isinstance(outcome, Granted)
    assert outcome.secret == before.secret
    assert outcome.start > 100.01  # its lease counts from the round that won
    assert outcome.untouched == set()


def test_first_contender_gives_way_to_a_waiter():
    """A node that is free, but serves a waiter first, will not give its vote to this caller."""
    attempt = Attempt(nodes=3, wait=0.0)
    attempt.reply(A, contender(NOW / 1e6 + 200.0), F)
    attempt.go_on(0.01)
    attempt.go_on(0.01)
    attempt.reply(A, Kind.QUEUED)

    undo = attempt.go_on(0.01)

    assert {type(request) for request in undo.requests.values()} == {Release}


@pytest.mark.parametrize("replies", [["b", "b", "b"], [F, "b", "b", "b"], ["b", "b", "c", "c", "b"]])
def test_holder_with_a_quorum_is_not_asked_again(replies: list[Any]):
    """With wait=0, one attempt is made if somebody does hold the lock."""
    attempt = Attempt(wait=0.0)
    attempt.reply(*replies)
    assert attempt.step.closed

    outcome = attempt.proceed()

    assert isinstance(outcome, GaveUp)
    assert (outcome.taken, outcome.attempts) == (True, 1)


def test_holder_that_one_node_did_not_extend_is_one_holder():
    """Stored values differ by the number of extensions; that is no split vote."""
    value = encode("", Owner("host", 7))
    attempt = Attempt(nodes=3, wait=0.0)
    attempt.reply(counted(value, 2), counted(value, 1), F)
    assert attempt.step.closed

    outcome = attempt.proceed()

    assert isinstance(outcome, GaveUp)
    assert (outcome.taken, outcome.attempts, outcome.holder) == (True, 1, value)


def test_no_quorum_is_explained_while_waiting():
    """A waiter that waits for nodes, not for another holder, can report that."""
    attempt = Attempt(wait=None)
    attempt.reply(F, F, F)

    pause = attempt.proceed()

    assert set(pause.silent) == {0, 1, 2}


def test_floor_is_bounded():
    """Many names cost no unbounded memory; the oldest are forgotten."""
    highest = HighestToken(size=2)

    for number, name in enumerate("abc", 1):
        highest.lift([name], number)

    assert (highest.of("a"), highest.of("b"), highest.of("c")) == (0, 2, 3)


NOAUTH = failed(Failure.NOAUTH)
REFUSED = failed(Failure.REFUSED)
CLUSTER = Reply(Kind.EXCLUDED, detail="runs in cluster mode")


@pytest.mark.parametrize(
    ("replies", "closed", "misconfigured"),
    [
        ([NOAUTH, CLUSTER, NOAUTH], True, True),
        ([REFUSED, NOAUTH, REFUSED], False, False),  # the other two may have the same configuration error
        ([REFUSED, NOAUTH, REFUSED, NOAUTH, NOAUTH], True, True),
        ([REFUSED, REFUSED, REFUSED], True, False),  # at most two can be
        ([REFUSED, NOAUTH, NOAUTH, REFUSED, REFUSED], True, False),
    ],
)
def test_nobody_waits_for_a_quorum_that_the_configuration_forbids(
    replies: list[Reply], closed: bool, misconfigured: bool
):
    """More nodes than may be missing will never vote as configured; any other failure may pass."""
    attempt = Attempt(wait=None)
    for node, reply in enumerate(replies):
        attempt.step.receive(node, reply)
    assert attempt.step.closed is closed

    outcome = attempt.go_on()
    while isinstance(outcome, Round):
        assert {type(request) for request in outcome.requests.values()} == {Release}
        outcome = attempt.go_on()

    assert isinstance(outcome, GaveUp if misconfigured else Pause)
    if misconfigured:
        assert (outcome.taken, outcome.misconfigured) == (False, True)
