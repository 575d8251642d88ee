"""Who excludes whom: the scopes, and ``hold_for``."""

from typing import Any

import pytest

from django_redlock import LockLostError, QuorumUnavailableError, locks
from django_redlock.celery import DuplicateTask

from .slots import NAME, names, set_down


@pytest.mark.parametrize(
    ("scope", "duplicates", "beside", "held"),
    [
        ("until_executed", [True, True], "nothing came", {NAME}),
        ("while_executing", [False, False], "IGNORED", {NAME}),
        ("until_executing", [False, True], "SUCCESS", set()),
        ("until_and_while_executing", [False, True], "IGNORED", {NAME, f"queued:{NAME}"}),
    ],
)
def test_calls_during_a_run(make, worker, scope, duplicates, beside, held):
    """Two calls are sent or are duplicates; the message of the first runs beside the run, or waits without a retry."""
    seen: list[Any] = []

    def body(self, shop_id):
        if len(worker.ids) == 1:
            seen.append([task.delay(7).duplicate for _ in range(2)])
            seen.append(worker.run() if worker.headers else "nothing came")
            seen.append(names())

    task = make(body, scope=scope, max_retries=0)
    task.delay(7)

    assert set(worker.run_all()) == {"SUCCESS"}
    assert seen == [duplicates, beside, held]
    assert len(worker.ids) == 1 + duplicates.count(False)
    assert (set(worker.retries), names()) == ({0}, set())


@pytest.mark.parametrize(
    ("scope", "kept"),
    [("until_executed", {NAME}), ("while_executing", set()), ("until_and_while_executing", {f"queued:{NAME}"})],
)
def test_slot_during_the_countdown_of_a_retry(make, worker, scope, kept):
    """A retry keeps the slot of those that wait, if its scope has one, and a duplicate joins the same id."""

    def body(self, shop_id):
        if not self.request.retries:
            raise self.retry(countdown=100)

    task = make(body, scope=scope)
    first = task.delay(7)
    assert worker.run() == "RETRY"

    assert names() == kept
    if kept:
        joined = task.delay(7)
        assert (joined.id, joined.reason) == (first.id, "queued")
    assert worker.run() == "SUCCESS"
    assert names() == set()


@pytest.mark.parametrize("scope", ["until_executed", "until_and_while_executing"])
def test_hold_for_keeps_the_slot_after_the_run(make, worker, memory_nodes, scope):
    """``hold_for`` keeps the slot for that time from the start of the run; afterwards it is free."""
    task = make(scope=scope, hold_for=60, on_overlap="drop")
    task.delay(7)
    worker.run()

    held = task.singleton.holder(7)
    task.apply_async((7,), task_id="too-soon")
    assert worker.run() == "IGNORED"
    for node in memory_nodes:
        node.store.skew += 61

    assert (held.state, 50 < held.ttl <= 60) == ("held", True)
    assert not task.singleton.is_locked(7)


def test_retry_of_a_task_with_hold_for(make, worker):
    """A retry is not held up by ``hold_for``: it is the same work."""

    def body(self, shop_id):
        if not self.request.retries:
            raise self.retry(countdown=0)

    for scope in ("until_executed", "while_executing"):
        make(body, scope=scope, hold_for=60, name=f"shop.{scope}").delay(7)
        assert worker.run_all() == ["RETRY", "SUCCESS"]


def test_direct_calls_can_be_locked(make, worker):
    """With ``lock_direct_calls`` a direct call takes the slot, knows when it is lost, and is refused during a run."""
    seen = []

    def body(self, shop_id):
        seen.append((names(), self.singleton.lease.name, self.singleton.remaining > 0))
        locks["default"].release(NAME, self.singleton.lease.secret)
        locks["default"].lock(NAME, ttl=30, wait=0, renew=False).acquire()
        self.singleton.lease.extend()
        seen.append(self.singleton.lost)
        self.singleton.check()

    task = make(body, lock_direct_calls=True)

    with pytest.raises(LockLostError):
        task(7)
    with pytest.raises(DuplicateTask):
        task(7)
    assert seen == [({NAME}, NAME, True), True]
    assert task.singleton.lease is None


def test_direct_call_without_nodes(make, memory_nodes):
    """Without an answer a direct call runs only if ``on_unavailable`` says so."""
    set_down(memory_nodes)

    assert make(lock_direct_calls=True, on_unavailable={"run": "run"})(7) == 7
    with pytest.raises(QuorumUnavailableError):
        make(lock_direct_calls=True, name="shop.other")(7)
