"""The queue of a name on one node, for those who wait there and for those who keep a place and go away."""

from typing import Any

import pytest

from django_redlock.core.node_state import NodeState
from django_redlock.core.protocol import Acquire, Kind, Release, Reply


class Clock:
    """A node's clock, which the test sets."""

    now = 1_795_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def node(clock: Clock) -> NodeState:
    """A node on which somebody holds the name."""
    node = NodeState(clock)
    ask(node, "holder")
    return node


def ask(node: NodeState, who: str, stamp: int = 0, away: float = 0.0) -> Reply:
    """Ask for the name; with a stamp, as one who waits."""
    secret = who.rjust(32, "0")
    request = Acquire(("{x}",), secret, secret, 3600.0, 1, 3600.0, 1e9, waiter=f"message|{who}" * bool(stamp))
    return node.execute(request._replace(stamp=stamp, away=away))


def release(node: NodeState, who: str, leaving: str = "") -> None:
    node.execute(Release(("{x}",), who.rjust(32, "0"), leaving=f"message|{leaving}" * bool(leaving)))


def test_place_is_kept_for_exactly_its_time(node: NodeState, clock: Any) -> None:
    """Until then, the lock is free and nobody else gets it; then the next one does."""
    ask(node, "first", 1, away=600.0)
    ask(node, "second", 2, away=900.0)
    release(node, "holder")

    clock.now += 599.9
    assert ask(node, "second", 2, away=900.0).kind is Kind.QUEUED
    assert ask(node, "passer-by").kind is Kind.QUEUED
    clock.now += 0.2
    assert ask(node, "second", 2, away=900.0).kind is Kind.GRANTED


def test_who_comes_back_in_time_is_served_first(node: NodeState, clock: Any) -> None:
    """A waiter that came later has asked again and again meanwhile."""
    ask(node, "first", 1, away=600.0)
    release(node, "holder")
    for _ in range(5):
        clock.now += 100.0
        assert ask(node, "second", 2, away=10.0).kind is Kind.QUEUED

    assert ask(node, "first", 1, away=600.0).kind is Kind.GRANTED


def test_each_visit_renews_a_place(node: NodeState, clock: Any) -> None:
    """And does not change it: whoever came later stays behind."""
    ask(node, "first", 1, away=60.0)
    ask(node, "second", 2, away=600.0)
    clock.now += 50.0
    ask(node, "first", 1, away=60.0)
    clock.now += 50.0

    assert node.waiters("{x}") == ["message|first", "message|second"]


def test_position_counts_those_who_come_before_without_the_holder(node: NodeState) -> None:
    positions = [ask(node, who, stamp, away=60.0).position for who, stamp in (("b", 2), ("c", 3), ("a", 1), ("b", 2))]

    assert positions == [0, 1, 0, 1]


def test_who_gives_up_a_place_delays_nobody(node: NodeState) -> None:
    ask(node, "first", 1, away=600.0)
    ask(node, "second", 2, away=600.0)
    release(node, "nobody", leaving="first")
    release(node, "holder")

    assert ask(node, "second", 2, away=600.0).kind is Kind.GRANTED


def test_who_was_away_has_no_place_once_it_holds_the_lock(node: NodeState) -> None:
    """It would be first once more after its own hold, and nobody would come."""
    ask(node, "first", 1, away=600.0)
    ask(node, "second", 2, away=600.0)
    release(node, "holder")
    ask(node, "first", 1, away=600.0)
    release(node, "first")

    assert ask(node, "second", 2, away=600.0).kind is Kind.GRANTED
