"""The queue of a key: what docs/howto/celery-outcomes.md says about it, with real workers and their messages."""

import os
import signal
from contextlib import suppress
from itertools import pairwise

import pytest

from django_redlock.inventory import find_lock
from django_redlock.singleton.line import GRACE, LONGEST_GUESS
from tests.managers import wait_until
from tests.services import children

from .project import LEASE
from .real import ON_BOTH, answer, consume, free, stop_with_all_noted, take_back, task

BURST = 8


@pytest.fixture(scope="module", autouse=True)
def killed(worker, start, stages, broker):
    """A burst, and the worker that is killed with all messages that it has; the broker delivers these again."""
    what = f"burst of a killed worker over {broker[:5]}"
    doomed = start("burst", concurrency=2)
    found = [task("one_by_one").apply_async((what, number), queue="burst") for number in range(BURST)]
    wait_until(lambda: len(stages(what).heard()) == 3)
    if broker.startswith("redis"):
        stop_with_all_noted(doomed.pid, "burst", found)
    for pid in (doomed.pid, *children(doomed.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    doomed.wait()
    consume("burst")
    if broker.startswith("redis"):
        take_back(*(result.id for result in found))
    return what, found, len(stages(what).heard())


def told(stage):
    """Return what runs have told: of each, its number, whether it began or ended, and when."""
    return [(int(number), event, float(at)) for number, event, at in (each.split() for each in stage.heard())]


def waiting(what):
    """Return how many messages wait in the queue of the slot of ``turn``."""
    return find_lock(task("turn").singleton.key(what, 0)).waiting


@ON_BOTH
def test_burst(worker, stage, what):
    """
    The calls of one key run one by one, and each of them runs.

    Their order is that in which the worker got them, unless nodes or processes are late; the simulation of slots shows
    it, where they are not.
    """
    first = task("turn").delay(what, 0)
    stage.hear("0 began")
    others = [task("turn").delay(what, number) for number in range(1, 9)]
    wait_until(lambda: waiting(what) == 8)

    for _ in range(9):
        stage.allow()

    assert [answer(result) for result in (first, *others)] == [*range(9)]
    assert sorted(stage.heard()) == [f"{number} began" for number in range(1, 9)]
    wait_until(free("turn", what, 0))


@ON_BOTH
def test_limit_of_a_burst(worker, stage, what):
    """With ``limit=3``, never four calls of one key run at once."""
    found = [task("three_at_once").delay(what, number) for number in range(15)]

    assert [answer(result) for result in found] == [*range(15)]
    running, at_once = set(), set()
    for number, event, _ in told(stage):
        (running.add if event == "began" else running.remove)(number)
        at_once.add(len(running))
    assert max(at_once) <= 3


@ON_BOTH
def test_revoked_call(worker, stage, what):
    """A waiting call that is revoked gives up its place before its result shows that, and the next one runs."""
    first = task("turn").delay(what, 0)
    stage.hear("0 began")
    revoked = task("turn").delay(what, 1)
    wait_until(lambda: waiting(what) == 1)
    next_one = task("turn").delay(what, 2)
    wait_until(lambda: waiting(what) == 2)

    revoked.revoke()
    wait_until(lambda: revoked.state == "REVOKED")  # its worker notices at the end of its pause
    wait_until(lambda: waiting(what) == 1, seconds=GRACE / 2)  # the last node may be a little later
    stage.allow()
    stage.allow()

    assert (answer(first), answer(next_one)) == (0, 2)
    assert stage.heard() == ["2 began"]


@ON_BOTH
def test_burst_of_a_worker_that_is_killed(killed, stages):
    """
    All its calls run in the end, one at a time, on another worker; and none is skipped.

    For one lease, the slot is that of the killed run. Then it is free for no longer than the pause of one message, and
    the moment for which the place of a lost message is kept.
    """
    what, found, before = killed

    assert [answer(result) for result in found] == [*range(BURST)]
    runs = told(stages(what))
    assert {number for number, event, _ in runs if event == "ended"} == {*range(BURST)}
    later = runs[before:]
    assert [event for _, event, _ in later] == ["began", "ended"] * (len(later) // 2)
    assert max(b - a for (*_, a), (*_, b) in pairwise(runs)) < LEASE + LONGEST_GUESS + GRACE
