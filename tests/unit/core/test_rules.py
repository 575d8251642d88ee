"""Numbers that cannot work are refused before anything is sent."""

import math
from typing import Any

import pytest

from django_redlock.core import names
from django_redlock.core.admission import Admission, Greeting
from django_redlock.core.protocol import Kind, Reply
from django_redlock.core.round import Round
from django_redlock.core.rules import Rules, majority


def test_majority():
    """Any two majorities share a node, and one or two nodes are no majority that could be right about a third."""
    assert [majority(nodes) for nodes in range(1, 8)] == [1, 2, 2, 3, 3, 4, 4]
    assert [(Rules(nodes).guards_restarts, Rules(nodes).compares_clocks) for nodes in (1, 2)] == [(False, False)] * 2
    assert Rules(2, clock_guard=True).compares_clocks


@pytest.mark.parametrize("ttl", [0, -1, math.nan, math.inf, 0.01, 60.5, "30", None, True, 10**400])
def test_ttl_that_cannot_work_is_refused(ttl: Any):
    """Zero, negative, not a number, too short, too long: refused before any request, and the message has the reason."""
    with pytest.raises(ValueError, match="ttl must be"):
        Rules(3, ttl=ttl)
    with pytest.raises(ValueError, match="ttl must be"):
        Rules(3).check_ttl(ttl)


def test_ttl_that_the_node_timeout_eats_is_refused():
    """Two rounds and the drift must leave half of the lease."""
    with pytest.raises(ValueError, match=r"ttl 1.0 is too short for a node_timeout of 0.3 s"):
        Rules(1, node_timeout=0.3).check_ttl(1.0)


def test_slugs_are_injective():
    """Names that look like parts of keys, or like digests of other names, share no key with them."""
    long = "x" * 300
    tricky = ["a", "a}", "{a", "a}:h", "a:h", long, long + "y", names.slug(long), names.slug(long)[1:], "x" * 120 + "…"]

    assert len({names.slug(name) for name in tricky}) == len(tricky)
    assert names.shown(names.slug("a}b")) == "a}b"
    assert names.shown(names.slug(long)) == "x" * 120 + "…"


@pytest.mark.parametrize(
    ("ttl", "names", "timeout"), [(30.0, 200, 0.25), (30.0, 201, 0.275), (30.0, 10_000, 1.475), (1.0, 10_000, 0.2)]
)
def test_round_over_many_names_may_take_longer(ttl: float, names: int, timeout: float):
    """Many names go to a node in parts, and two rounds still leave half of the lease."""
    rules = Rules(3)

    assert rules.timeout(ttl, names) == pytest.approx(timeout)
    assert 2 * rules.timeout(ttl, names) + rules.drift(ttl) <= ttl / 2
    assert Rules(3, node_timeout=0.1).timeout(ttl, names) == 0.1


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


EPOCH = 1_795_000_000.0
VOTE = Reply(Kind.ACCEPTED, time=1_000_001_000_000_000)


def admission(**options: Any) -> tuple[Admission, Clock]:
    clock = Clock()
    return Admission(Rules(3, ttl=30.0, **options), ("a", "b", "c"), clock, lambda: clock() + EPOCH), clock


def test_uptime_is_not_believed_when_the_old_run_answered_later():
    """A node clock that ran forward makes the uptime too long; a new run id and our own clock detect it."""
    watch, clock = admission()
    watch.greet(0, Greeting("r1", age=5000.0))
    watch.judge(0, VOTE, 1000.0)
    clock.now += 2.0

    watch.greet(0, Greeting("r2", age=900.0))

    assert "votes again in 59 s" in watch.objection(0)


def test_threads_that_connect_at_once_do_not_disturb_each_other():
    """Another thread may report a node in the middle of a comparison, which does not fail."""
    watch, _ = admission()
    greetings = iter([1])

    class Telling(str):
        def __eq__(self, other: object) -> bool:
            for node in greetings:
                watch.greet(node, Greeting("r2", 1e6))
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    watch._run_ids[2] = Telling("other")

    watch.greet(0, Greeting("r1", 1e6))

    assert [watch.objection(node) for node in range(2)] == ["", ""]


@pytest.mark.parametrize("options", [{"restart_guard": False}, {"durable": ("a",)}])
def test_guard_can_be_turned_off_and_durable_nodes_need_none(options: dict[str, Any]):
    """The guard is off for tests, and for nodes whose append-only file is always synced."""
    watch, _ = admission(**options)
    watch.greet(0, Greeting("r1", age=0.0))

    assert watch.judge(0, VOTE, 1000.0) is VOTE


def test_same_server_twice_has_no_two_votes_though_threads_connect_at_once():
    """Each of two threads learns of one of its names before either of them has recorded it."""

    others = iter([1])

    def clock() -> float:
        for node in others:
            watch.greet(node, Greeting(run_id="one"))  # by the other thread
        return 1.0

    watch = Admission(Rules(3, restart_guard=False), ("a", "b", "c"), clock, lambda: 1.0)
    watch.greet(0, Greeting(run_id="one"))

    assert sorted(bool(watch.objection(node)) for node in range(2)) == [False, True]


def test_server_that_is_listed_twice_votes_once_and_says_for_which_node():
    """The node that was asked first votes, for as long as it is that server, and for some seconds if it is silent."""
    watch, clock = admission(restart_guard=False)
    watch.greet(1, Greeting("one"))
    watch.greet(0, Greeting("one"))
    assert [watch.objection(node) for node in range(2)] == ["is the same server as b", ""]

    clock.now += 9.0
    watch.greet(1, Greeting("two"))  # its address was corrected
    watch.greet(0, Greeting("one"))
    assert [watch.objection(node) for node in range(2)] == ["", ""]

    clock.now += 30.0
    watch.greet(2, Greeting("two"))
    assert watch.objection(2) == ""


def test_one_connection_asks_for_all_while_what_the_node_said_is_young():
    """Later each one asks, because its vote may count before the answer to another one comes."""
    watch, clock = admission(restart_guard=False)
    watch.greet(0, Greeting("one"))

    def asked() -> bool:
        due = clock() > watch.due[0]
        if due:
            watch.asks(0, clock())
        return due

    assert not asked()
    clock.now += 9.0
    assert [asked(), asked()] == [True, False]
    clock.now += 60.0
    assert [asked(), asked()] == [True, True]
    watch.greet(0, Greeting("one"))
    assert not asked()


def tell(watch: Admission, clock: Clock, node: int, ahead: float = 0.0, took: float = 0.001) -> Reply:
    """Let a node answer with its time, *ahead* of the right one."""
    sent = clock.now
    clock.now += took
    time = round((sent + took / 2 + EPOCH + ahead) * 1e6)
    return watch.judge(node, Reply(Kind.ACCEPTED, time=time), sent)


def test_node_whose_clock_ran_forward_gives_no_vote():
    """Keys on the node may have ended too early; it votes again when every earlier lease has ended."""
    watch, clock = admission()
    assert tell(watch, clock, 0).kind is Kind.ACCEPTED

    clock.now += 5
    reply = tell(watch, clock, 0, ahead=2.0)

    assert reply.kind is Kind.NO_VOTE
    assert reply.detail == (
        "its clock ran 1.999 s forward, votes again in 61 s (OPTIONS['clock_guard'], which tests that freeze or move "
        "the time set to False)"
    )
    clock.now += 62
    assert tell(watch, clock, 0, ahead=2.0).kind is Kind.ACCEPTED


@pytest.mark.parametrize(
    ("ahead", "took", "later"), [(0.0025, 0.001, 0.0), (-30.0, 0.001, 0.0), (2.0, 5.0, 0.0), (40.0, 0.001, 86_400.0)]
)
def test_step_that_is_harmless_or_undetectable_costs_no_vote(ahead: float, took: float, later: float):
    """Within the rounding of expiry, backwards, no larger than the reply took, or gained slowly while nobody looked."""
    watch, clock = admission()
    tell(watch, clock, 0)
    clock.now += later

    assert tell(watch, clock, 0, ahead=ahead, took=took).kind is Kind.ACCEPTED


def test_small_steps_of_a_clock_add_up_while_replies_are_slow():
    """A slow reply leaves room for a step; the next steps are measured from the reply that left least."""
    watch, clock = admission()
    tell(watch, clock, 0)
    assert tell(watch, clock, 0, ahead=0.009, took=0.02).kind is Kind.ACCEPTED  # the reply may have taken that long
    assert tell(watch, clock, 0, ahead=0.018, took=0.02).kind is Kind.NO_VOTE


def test_clocks_may_move_where_the_settings_say_so():
    """Tests that freeze or move the time switch the guard off."""
    watch, clock = admission(clock_guard=False)

    assert {tell(watch, clock, 1, ahead).kind for ahead in (60.0, 0.0, 500.0)} == {Kind.ACCEPTED}


def test_late_replies_are_reported_unless_they_only_confirm_the_outcome():
    """A later token is noted whenever it comes; the token of the round is known by then."""
    late: list[Reply] = []
    round = Round(dict.fromkeys(range(5), VOTE), lambda replies: False, 1.0, 2, Kind.ACCEPTED, on_late=late.append)
    for node, kind in enumerate((Kind.ACCEPTED, Kind.ACCEPTED, Kind.ACCEPTED, Kind.BUSY, Kind.FAILED)):
        round.receive(node, VOTE._replace(kind=kind))

    assert [reply.kind for reply in late] == [Kind.BUSY, Kind.FAILED]
    assert list(round.late) == [2, 3, 4]
    assert round.missed() == {4}
