"""Decisions of two processes about one slot, in every order of their questions."""

from itertools import product
from typing import Any

import pytest

from django_redlock.singleton.arrival import Run, TaskRow, cancel, occupy

from .facts import BOTH, QUEUE, QUEUED, TICKET, by, scene


@pytest.mark.parametrize("scope", [{}, QUEUE, BOTH], ids=str)
def test_row_that_is_cancelled_while_it_begins(scope: Any) -> None:
    """Either it does not run, or ``cancel()`` says that no row waits, whatever the worker and the caller do first."""
    outcomes = set()
    for turns in product((0, 1), repeat=10):
        row, facts = scene(TaskRow, ticket=TICKET.without_slot, **scope)
        place = row.ticket.waiting
        facts.locks = by("mine", QUEUED, name=place, own="a")
        steps = facts.steps(occupy(row)), facts.steps(cancel(row.ticket, place, facts.locks[place], 60.0))
        ended: dict[int, Any] = {}
        for turn in turns + (0,) * 20 + (1,) * 20:
            try:
                next(steps[turn])
            except StopIteration as stop:
                ended.setdefault(turn, stop.value)
        assert isinstance(ended[0], Run) is not ended[1]
        outcomes.add(ended[1])

    assert outcomes == {True, False}
