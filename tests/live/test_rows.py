"""
``lock_for_update`` in processes of their own, over real nodes and a real database.
"""

import pytest

from tests.shop.models import Order

from .conftest import PATIENCE, Live, outcome, said
from .lockers import ROWS, SET


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.once)])
def test_overlapping_sets_in_opposite_order_never_deadlock(live: Live, database: str, seconds: int):
    """
    Two processes that lock overlapping sets of rows, one forwards and one backwards, waiting for ever, go on until
    their time is over, and lose no increment (L56, L52).
    """
    Order.objects.using(database).bulk_create(Order(pk=pk) for pk in range(1, ROWS + 1))
    processes = [live.python("-m", "tests.live.lockers", str(seconds), order) for order in ("forwards", "backwards")]
    for process in processes:
        assert said(process) == "ready"

    for process in processes:
        process.stdin.write(b"\n")
        process.stdin.flush()
    outcomes = [outcome(process, seconds + PATIENCE) for process in processes]

    assert [(err, code) for _, err, code in outcomes] == [("", 0)] * 2
    locked = [int(out) for out, _, _ in outcomes]
    print(f"\nsets locked in {seconds} s: {locked[0]} forwards, {locked[1]} backwards")
    assert min(locked) > 0
    assert sum(Order.objects.using(database).values_list("total", flat=True)) == sum(locked) * SET
