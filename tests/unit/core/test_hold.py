"""A held lock, given the time and the replies."""

import json
import pickle
from typing import Any

import pytest

from django_redlock.core.attempt import Granted, HighestToken
from django_redlock.core.hold import HoldState
from django_redlock.core.names import Owner
from django_redlock.core.protocol import EndReason, Extended, Kind, Outcome, Reply
from django_redlock.core.round import Round
from django_redlock.core.rules import Rules, Wanted
from django_redlock.exceptions import LockLostError

H, R, F, U = Kind.HELD, Kind.REFUSED, Kind.FAILED, Kind.UNKNOWN
START, TTL = 100.0, 9.0
DEADLINE = START + TTL - 0.092


def held(
    nodes: int = 5,
    heartbeat: float | None = None,
    untouched: frozenset[int] = frozenset(),
    hold_until: float = 0.0,
    **options: Any,
) -> HoldState:
    rules = Rules(nodes, ttl=TTL, **options)
    value, deadline = "a" * 32 + "{}", rules.deadline(START, TTL)
    granted = Granted(
        ("{x}",), "a" * 32, value, 7, START, deadline, 0.25, (), untouched=untouched, hold_until=hold_until
    )
    wanted = Wanted(("x",), TTL, None, Owner(), heartbeat=heartbeat)
    return HoldState(wanted, granted, rules, HighestToken())


def extension(hold: HoldState, now: float, ttl: float | None = None) -> Round:
    """Begin a round that extends one lease."""
    term = hold.term(now, ttl)
    assert term is not None
    round = Round.to_extend([term], hold._rules, hold._rules.timeout(hold.ttl), hold.deadline - now)
    hold.asked(round, term)
    return round


def answer(round: Round, *kinds: Kind, fence: int = 0) -> Round:
    for node, kind in enumerate(kinds):
        if not round.closed:
            round.receive(node, Reply(kind, fence, terms=(Extended(kind, fence),) if kind in (H, R) else ()))
    round.close()
    return round


def test_release_in_spite_of_a_minimum_hold_is_redelivered_until_that_would_end():
    """A node that misses the release of work that failed (``hold_on_error=False``) would keep the lock until then."""
    hold = held(hold_until=START + 500.0)
    hold.keeps = False
    hold.end(EndReason.RELEASED, START + 20.0)

    assert hold.release(0.25).lasting == 480.0


def test_extension_waits_no_longer_than_the_lease_lasts():
    """The round that extends a lease ends before the lease does."""
    round = extension(held(node_timeout=2.0), DEADLINE - 0.05)

    assert round.timeout == pytest.approx(0.05)


@pytest.mark.parametrize("replies", [[F, F, F], [H, H, F, F, F], [H, H, R, R, U], []])
def test_round_without_a_verdict_changes_nothing(replies: list[Kind]):
    """Unknown is not lost. The deadline stays, and the extension is tried again after a twelfth of the ttl."""
    hold = held()
    round = extension(hold, 103.0)

    assert not hold.extended(answer(round, *replies), 0, 103.0, 103.2)

    assert (hold.ended, hold.deadline) == (None, pytest.approx(DEADLINE))
    assert hold.next_event(renewing=True) == pytest.approx(103.0 + TTL / 12)


def test_lease_at_its_bound_is_next_due_at_its_deadline():
    """A lease that may not be extended is not touched until it ends, however the seconds round."""
    start = 7734.392480692
    rules = Rules(5, ttl=0.6, node_timeout=0.1, max_hold=0.2)
    granted = Granted(("{x}",), "a" * 32, "", 7, start, rules.deadline(start, 0.6), 0.1, ())
    hold = HoldState(Wanted(("x",), 0.6, None, Owner()), granted, rules, HighestToken())

    assert hold.term(start + 0.2 + 1e-9) is None

    assert hold.next_event(renewing=True) == hold.deadline


def test_release_leaves_out_what_never_got_a_request():
    """A node that never got a request gets no release, unless an extension may have given it the lock."""
    hold = held(untouched=frozenset({3, 4}))
    assert set(hold.release(0.2).requests) == {0, 1, 2}

    round = extension(hold, 103.0)
    answer(round, H, H, H)

    assert set(hold.release(0.2).requests) == {0, 1, 2, 3, 4}


def test_node_that_may_execute_a_shortening_is_not_counted_for_a_longer_time():
    """A node that may still execute an older request counts only for the shorter time."""
    hold = held(3)
    shorter = extension(hold, 101.0, ttl=3.0)
    answer(shorter, U, H)
    longer = extension(hold, 102.0, ttl=9.0)

    assert not hold.extended(answer(longer, H, H, F), 0, 102.0, 102.1)

    assert hold.deadline == pytest.approx(101.0 + 3.0 - 0.032)


def test_extension_by_the_old_time_does_not_prolong_a_lease_that_was_shortened():
    """The renewal was in flight when the holder asked for less."""
    hold = held()
    renewing = extension(hold, 103.0)
    extension(hold, 103.1, ttl=2.0)

    assert not hold.extended(answer(renewing, H, H, H), 0, 103.0, 103.2)

    assert hold.deadline == pytest.approx(103.1 + 2.0 - 0.022)


def test_heartbeat_is_looked_for_when_the_extension_is_due():
    """Nobody knows beforehand whether the work will have sent a heartbeat by then; a late one still counts."""
    hold = held(heartbeat=1.0)

    assert hold.next_event(renewing=True) == pytest.approx(START + TTL / 3)
    assert hold.term(START + TTL / 3) is None
    assert hold.next_event(renewing=True) == pytest.approx(START + TTL / 3 + TTL / 12)

    hold.beat(START + 3.5)
    assert hold.term(START + TTL / 3 + TTL / 12) is not None


def test_reasons_and_outcomes_are_texts_for_users_and_members_for_the_package():
    """What a release returns and why a hold ended compare, show and pickle as texts."""
    assert f"{Outcome.RELEASED}, {EndReason.MAX_HOLD}" == "released, max_hold"
    assert json.dumps({"outcome": Outcome.TAKEN}) == '{"outcome": "taken"}'
    error = pickle.loads(pickle.dumps(LockLostError("a", EndReason.FENCED, 2.0)))
    assert type(error.reason) is str
    assert error.args == ("a", "fenced", 2.0)
