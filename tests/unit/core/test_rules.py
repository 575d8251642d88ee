"""Numbers that cannot work are refused before anything is sent."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from django_redlock.core import names
from django_redlock.core.admission import Admission, Greeting
from django_redlock.core.names import decode
from django_redlock.core.protocol import Kind, Reply
from django_redlock.core.round import Round, count
from django_redlock.core.rules import Rules, check_wait, majority


def test_majority():
    """Any two majorities share a node; four of five survive amnesia that three of five does not, so that is allowed."""
    assert [majority(nodes) for nodes in range(1, 8)] == [1, 2, 2, 3, 3, 4, 4]
    assert (Rules(5).spare, Rules(5, quorum=4).spare) == (2, 1)


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


@pytest.mark.parametrize("wait", [-1, math.nan, math.inf, "5", True])
def test_wait_that_cannot_work_is_refused(wait: Any):
    """A negative or infinite wait is a mistake; for ever is None."""
    with pytest.raises(ValueError, match="wait must be"):
        check_wait(wait)
    assert (check_wait(None), check_wait(0), check_wait(2.5)) == (None, 0, 2.5)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("", ValueError, "must not be empty"),
        ("x" * 1_000_000, ValueError, r"may have 8192 bytes.*has 1000000; use an identifier or a digest"),
        ("\ud800", ValueError, "UTF-8 cannot encode"),
        (7, TypeError, r"must be a str, not int; write lock\(str"),
        (b"a", TypeError, "must be a str, not bytes"),
        ([], ValueError, "names nothing to lock"),
        (["a", 1], TypeError, "must be a str, not int"),
        ([str(number) for number in range(10_001)], ValueError, "may have 10000 names, not 10001"),
    ],
)
def test_name_that_cannot_be_one_is_refused(name: Any, error: type[Exception], message: str):
    """The error says what is wrong and what to write instead, and does not repeat a megabyte."""
    with pytest.raises(error, match=message) as caught:
        names.check_names(name)
    assert len(str(caught.value)) < 300


def test_slugs_are_injective():
    """Names that look like parts of keys, or like digests of other names, share no key with them."""
    long = "x" * 300
    tricky = ["a", "a}", "{a", "a}:h", "a:h", long, long + "y", names.slug(long), names.slug(long)[1:], "x" * 120 + "…"]

    assert len({names.slug(name) for name in tricky}) == len(tricky)
    assert names.shown(names.slug("a}b")) == "a}b"
    assert names.shown(names.slug(long)) == "x" * 120 + "…"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quorum": 2}, "quorum must be a whole number from 3"),
        ({"quorum": 6}, "to 5, not 6"),
        ({"quorum": True}, "quorum"),
        ({"node_timeout": 0}, "node_timeout must be more than 0"),
        ({"max_ttl": math.inf}, "max_ttl must be a finite number"),
        ({"drift_factor": 0.9}, "drift_factor must be at least 0 and below 0.5"),
        ({"renew": "yes"}, "renew must be True or False"),
        ({"max_extensions": -1}, "max_extensions must be"),
        ({"max_hold": -5}, "max_hold must be more than 0"),
        ({"restart_guard": "off"}, "restart_guard must be"),
        ({"durable": "a"}, "durable must be a list"),
        ({"retry_delay": math.nan}, "retry_delay must be a finite number"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str):
    """Every number is checked where it is read, and named."""
    with pytest.raises(ValueError, match=message):
        Rules(5, **options)


@pytest.mark.parametrize(
    ("ttl", "names", "timeout"), [(30.0, 200, 0.25), (30.0, 201, 0.275), (30.0, 10_000, 1.475), (1.0, 10_000, 0.2)]
)
def test_round_over_many_names_may_take_longer(ttl: float, names: int, timeout: float):
    """Many names go to a node in parts, and two rounds still leave half of the lease."""
    rules = Rules(3)

    assert rules.timeout(ttl, names) == pytest.approx(timeout)
    assert 2 * rules.timeout(ttl, names) + rules.drift(ttl) <= ttl / 2
    assert Rules(3, node_timeout=0.1).timeout(ttl, names) == 0.1


def test_names_of_a_lock_are_shown_without_filling_pages():
    """An error or a log line about ten thousand names is readable."""
    shown = names.named(tuple(f"n{number:05}" for number in range(10_000)))

    assert shown.endswith("n00018, n00019 and 9980 more")
    assert names.named(("a", "b")) == "a, b"


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"host": 1}', "f" * 32, '{"host":"h","pid":"x"}', '{"host":' + "[" * 100_000]
)
def test_foreign_value_describes_no_owner(text: str):
    """A value that something else wrote is not an error."""
    assert decode(text) is None


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


EPOCH = 1_795_000_000.0
VOTE = Reply(Kind.ACCEPTED, time=1_000_001_000_000_000)


def admission(**options: Any) -> tuple[Admission, Clock]:
    clock = Clock()
    return Admission(Rules(3, ttl=30.0, **options), ("a", "b", "c"), clock, lambda: clock() + EPOCH), clock


def test_restarted_node_votes_after_the_guard_time():
    """The guard time is the longest lease and its drift after the start, and the error has it."""
    watch, clock = admission()
    watch.greet(0, Greeting("r1", age=11.0))

    assert watch.judge(0, VOTE, 1000.0).kind is Kind.NO_VOTE
    assert watch.objection(0) == "restarted or is new to these locks, votes again in 51 s (OPTIONS['restart_guard'])"
    clock.now += 50.7
    assert watch.judge(0, VOTE, 1000.0).kind is Kind.NO_VOTE  # sent during the guard time, read after it
    assert watch.judge(0, VOTE, clock.now).kind is Kind.ACCEPTED


def test_uptime_is_not_believed_when_the_old_run_answered_later():
    """A node clock that ran forward makes the uptime too long; a new run id and our own clock detect it."""
    watch, clock = admission()
    watch.greet(0, Greeting("r1", age=5000.0))
    watch.judge(0, VOTE, 1000.0)
    clock.now += 2.0

    watch.greet(0, Greeting("r2", age=900.0))

    assert "votes again in 59 s" in watch.objection(0)


@pytest.mark.parametrize(("before", "silent", "said"), [("", 0.0, "61 s"), ("first", 20.0, "41 s")])
def test_node_that_was_a_replica_meanwhile_votes_after_the_guard_time(before: str, silent: float, said: str):
    """
    The node has the data of another server, though it has not been restarted; the time counts from its last reply.
    """
    watch, clock = admission()
    watch.greet(0, Greeting("r1", age=5000.0, promoted=before))
    assert watch.judge(0, VOTE, 1000.0) is VOTE
    clock.now += silent

    watch.greet(0, Greeting("r1", age=5000.0 + silent, promoted="again"))

    assert watch.objection(0) == f"was a replica, votes again in {said} (OPTIONS['restart_guard'])"


def test_promotion_that_has_been_known_costs_no_vote():
    """The id is the same at every connection, and servers change it when they have had no replica for long."""
    watch, _ = admission()
    for promoted in ("once", "once", ""):
        watch.greet(0, Greeting("r1", age=5000.0, promoted=promoted))

    assert watch.judge(0, VOTE, 1000.0) is VOTE


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


def test_guard_is_on_from_three_nodes():
    """With one or two nodes the guard is off, because a restart loses the lock anyway, as the documentation says."""
    assert [Rules(nodes).guards_restarts for nodes in (1, 2, 3, 5)] == [False, False, True, True]


def test_node_that_does_not_say_its_uptime_gives_no_vote_for_the_guard_time():
    """An ACL that refuses INFO may hide a restart."""
    watch, _ = admission()
    watch.greet(0, Greeting())

    assert watch.judge(0, VOTE, 1000.0).kind is Kind.NO_VOTE


def test_node_that_may_evict_keys_never_votes():
    """The error has the reason, and the option that allows it."""
    watch, _ = admission()
    watch.greet(0, Greeting("r", 1e6, evicts=True))

    assert watch.judge(0, VOTE, 1000.0).detail == "may evict keys (OPTIONS['allow_evicting'])"
    assert watch.judge(0, Reply(Kind.BUSY), 1000.0).kind is Kind.BUSY


def test_same_server_twice_has_no_two_votes_though_threads_connect_at_once():
    """Each of two threads learns of one of its names before either of them has recorded it."""

    class Watch(Admission):
        def _exclusion(self, node: int, greeting: Greeting) -> str:
            said = super()._exclusion(node, greeting)
            if node == 0:
                self.greet(1, greeting)  # by the other thread
            return said

    watch = Watch(Rules(3, restart_guard=False), ("a", "b", "c"), lambda: 1.0, lambda: 1.0)
    watch.greet(0, Greeting(run_id="one"))

    assert [bool(watch.objection(node)) for node in range(2)] == [False, True]


def test_same_server_twice_has_one_vote():
    """The second address of one run id is excluded, and votes again when it is another server."""
    watch, _ = admission()
    watch.greet(0, Greeting("r", 1e6))
    watch.greet(1, Greeting("r", 1e6))
    assert (watch.objection(0), watch.objection(1)) == ("", "is the same server as a")

    watch.greet(1, Greeting("other", 1e6))

    assert watch.judge(1, VOTE, 1000.0).kind in (Kind.ACCEPTED, Kind.NO_VOTE)
    assert "same server" not in watch.objection(1)


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


@pytest.mark.parametrize(("ahead", "took"), [(0.0025, 0.001), (-30.0, 0.001), (2.0, 5.0)])
def test_step_that_is_harmless_or_undetectable_costs_no_vote(ahead: float, took: float):
    """Within the rounding of expiry, backwards, or no larger than the reply took to arrive."""
    watch, clock = admission()
    tell(watch, clock, 0)

    assert tell(watch, clock, 0, ahead=ahead, took=took).kind is Kind.ACCEPTED


def test_small_steps_of_a_clock_add_up_while_replies_are_slow():
    """A slow reply leaves room for a step; the next steps are measured from the reply that left least."""
    watch, clock = admission()
    tell(watch, clock, 0)
    assert tell(watch, clock, 0, ahead=0.009, took=0.02).kind is Kind.ACCEPTED  # the reply may have taken that long
    assert tell(watch, clock, 0, ahead=0.018, took=0.02).kind is Kind.NO_VOTE


def test_clock_that_gains_slowly_costs_no_vote():
    """A clock that nobody read for a day does not count as run forward."""
    watch, clock = admission()
    tell(watch, clock, 0)

    clock.now += 86_400

    assert tell(watch, clock, 0, ahead=40.0).kind is Kind.ACCEPTED


def test_clock_far_from_most_others_gives_no_vote_to_a_client_that_has_just_started():
    """
    A client that has seen no step compares the nodes with each other, when the round is decided. If the clock is put
    right meanwhile, earlier keys may have ended too early: nobody knows since when it was wrong.
    """
    watch, clock = admission()
    for node, ahead in enumerate([60.0, 0.0, 0.2]):
        tell(watch, clock, node, ahead)
    assert list(watch.doubts) == [0]
    assert "OPTIONS['clock_guard']" in watch.doubts[0]

    reply = tell(watch, clock, 0)

    assert not watch.doubts
    assert reply.detail.startswith(
        "its clock went 59.999 s back to the others', votes again in 61 s (OPTIONS['clock_guard'], which tests"
    )
    clock.now += 62
    assert tell(watch, clock, 0).kind is Kind.ACCEPTED


def test_own_clock_counts_while_few_nodes_are_known():
    """Of two nodes that disagree, the one that agrees with the client votes; a wrong client agrees with none."""
    watch, clock = admission()
    tell(watch, clock, 0, ahead=60.0)
    assert list(watch.doubts) == [0]

    tell(watch, clock, 1)
    assert list(watch.doubts) == [0]

    tell(watch, clock, 2, ahead=60.0)
    assert list(watch.doubts) == [1]


def test_two_clocks_are_not_compared_unless_asked_for():
    """With one node or two there is no majority that could be right, so their clocks are not compared."""
    assert not Rules(1).compares_clocks
    assert not Rules(2).compares_clocks
    assert Rules(2, clock_guard=True).compares_clocks
    watch, clock = admission(clock_guard=False)
    for node, ahead in enumerate([60.0, 0.0, 0.0]):
        assert tell(watch, clock, node, ahead).kind is Kind.ACCEPTED
    assert tell(watch, clock, 1, ahead=500.0).kind is Kind.ACCEPTED
    assert not watch.doubts


def test_doubted_votes_do_not_count():
    """A quorum needs the votes of nodes that are not doubted at the moment of the decision."""
    doubted = {0: "its clock is far from the others'"}
    round = Round({0: VOTE, 1: VOTE, 2: VOTE}, lambda replies: count(replies, Kind.ACCEPTED) >= 2, 1.0)
    round.admission = SimpleNamespace(doubts=doubted)

    round.receive(0, VOTE)
    round.receive(1, VOTE)
    assert not round.closed
    round.receive(2, VOTE)

    assert round.closed
    assert [round.replies[node].kind for node in range(3)] == [Kind.NO_VOTE, Kind.ACCEPTED, Kind.ACCEPTED]


@pytest.mark.parametrize(
    ("kinds", "needed", "doubted", "won", "complete"),
    [
        ((Kind.ACCEPTED,) * 3, 3, {}, True, True),
        ((Kind.ACCEPTED,) * 2, 2, {}, True, False),
        ((Kind.ACCEPTED, Kind.FAILED, Kind.ACCEPTED), 2, {}, False, False),
        ((Kind.ACCEPTED,) * 3, 3, {1: "its clock"}, False, False),
        ((Kind.BUSY,) * 3, 2, {}, False, False),
    ],
)
def test_only_a_round_without_any_other_reply_is_understood_by_a_count(
    kinds: tuple[Kind, ...], needed: int, doubted: dict[int, str], won: bool, complete: bool
):
    """A vote in doubt, a failed node or too few replies lead to a look at every reply."""
    requests = dict.fromkeys(range(3), VOTE)
    round = Round(requests, lambda replies: False, 1.0, needed, Kind.ACCEPTED)
    round.admission = SimpleNamespace(doubts=doubted)
    for node, kind in enumerate(kinds):
        round.receive(node, VOTE._replace(kind=kind))
    round.close()

    assert (round.won, round.complete) == (won, complete)
    assert round.missed() == round.untouched() == {node for node, kind in enumerate(kinds) if kind is Kind.FAILED}
    assert round.unanswered() == set(range(len(round.replies), 3))


def test_late_replies_are_reported_unless_they_only_confirm_the_outcome():
    """A later token is noted whenever it comes; the token of the round is known by then."""
    late: list[Reply] = []
    round = Round(dict.fromkeys(range(5), VOTE), lambda replies: False, 1.0, 2, Kind.ACCEPTED, on_late=late.append)
    for node, kind in enumerate((Kind.ACCEPTED, Kind.ACCEPTED, Kind.ACCEPTED, Kind.BUSY, Kind.FAILED)):
        round.receive(node, VOTE._replace(kind=kind))

    assert [reply.kind for reply in late] == [Kind.BUSY, Kind.FAILED]
    assert list(round.late) == [2, 3, 4]
    assert round.missed() == {4}
