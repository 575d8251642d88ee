"""The record of a pending call on nodes that disagree, because they were away at different times."""

import pytest

from django_redlock import lock
from django_redlock.celery import pending
from django_redlock.celery.pending import UNKNOWN, began_secret, is_superseded, label_of
from django_redlock.celery.slots import FREE, NOTE, QUEUED, Seen, Ticket, peek
from django_redlock.core.names import Owner, encode

from .slots import NAME, names


@pytest.fixture
def split(make, worker, memory_nodes):
    """
    A task with two messages of one pending call; each lock node that answers knows one of them.

    Returns the task, and the arguments of its runs.
    """
    ran = []
    first, _, third = memory_nodes

    def body(self, shop_id):
        ran.append(self.request.args[1])
        if ran == ["running"]:
            pending = sync.apply_async((7, "older"))
            third.down = True
            assert sync.apply_async((7, "newer")).id == pending.id
            third.down, first.down = False, True

    sync = make(body, on_duplicate="rerun")
    sync.apply_async((7, "running"))
    worker.run()
    return sync, ran


def test_older_message_ends_on_the_evidence_of_one_node(split, worker):
    """
    A message that a newer one replaced never runs, even if only one node of those that answer has the newer one. C96
    """
    _, ran = split

    worker.run_all()

    assert ran == ["running", "newer"]


def test_caller_settles_a_split_record(split, worker):
    """
    A call that finds a record without a quorum for any value gets the id of the newest one, and its own arguments run.
    C96 C97
    """
    sync, ran = split
    (pending,) = {headers["id"] for headers in worker.headers}

    same = sync.apply_async((7, "newer"))
    last = sync.apply_async((7, "last"))
    worker.run_all()

    assert (same.id, same.accepted, last.id) == (pending, False, pending)
    assert ran == ["running", "last"]


def test_pending_call_is_created_in_its_turn(make, memory_nodes, monkeypatch):
    """
    No record comes into being while another call has the turn, and might settle a record that is only on its way. C96
    """
    task = make(on_duplicate="replace")
    monkeypatch.setattr(pending, "LONGEST_LINE", 0.0)

    with lock(f"turn:{NAME}"):
        assert task.delay(7).accepted
        assert names() == {f"turn:{NAME}"}


def seen(number, secret="b" * 32, task_id="call", fence=1, note=False):
    """Return a record of a pending call, or a note that it has begun, as nodes have it."""
    secret = began_secret(secret) if note else secret
    label = f"shop.sync #{UNKNOWN}.{number}{NOTE}" if note else label_of("shop.sync", UNKNOWN, number) + QUEUED
    return Seen(encode(secret, Owner("host", 1, "task", label, task_id)), 60.0, 1, fence)


def disagreeing(*records):
    return FREE._replace(split=records)


OWN = "a" * 32


@pytest.mark.parametrize(
    ("record", "note", "superseded"),
    [
        (FREE, FREE, False),
        (seen(2, OWN), FREE, False),
        (seen(3), FREE, True),
        (seen(2), FREE, True),  # of two messages with one number, the one that the record names counts
        (seen(1), FREE, False),
        (seen(3, task_id="other"), FREE, False),
        (disagreeing(seen(3)), FREE, True),
        (disagreeing(seen(2)), FREE, False),  # it may come from a caller that failed
        (disagreeing(seen(2, fence=9), seen(2, OWN)), FREE, True),
        (disagreeing(seen(2, OWN, fence=9), seen(2)), FREE, False),
        (disagreeing(seen(3, task_id="other"), seen(2, OWN)), FREE, False),
        (disagreeing(seen(2, OWN)), seen(3, note=True), True),  # a node that was away has kept the record
        (FREE, seen(2, note=True), True),
        (FREE, disagreeing(seen(3, note=True)), True),
        (FREE, seen(2, OWN, note=True), False),  # its own run, or that of a copy
        (FREE, seen(1, note=True), False),
    ],
)
def test_evidence_against_a_message(record, note, superseded):
    """
    A message is dropped only on evidence of another message that is at least as new, on one node or on many. C96
    """
    ticket = Ticket("name", "default", "call", OWN, number=2)

    assert is_superseded(ticket, record, note) is superseded


def test_leavings_of_another_call_keep_no_message_from_its_run(make, worker, memory_nodes):
    """
    A node that was away keeps the record of an earlier call. The message of the next call frees its own and runs. C96
    """
    first, _, third = memory_nodes
    ran = []

    def body(self, shop_id):
        ran.append(self.request.args[1])
        if self.request.args[1].startswith("running"):
            sync.apply_async((7, f"after {self.request.args[1]}"))

    sync = make(body, on_duplicate="rerun")
    sync.apply_async((7, "running 1"))
    worker.run()
    third.down = True
    worker.run_all()  # frees the record on two nodes
    sync.apply_async((7, "running 2"))
    worker.run()
    third.down, first.down = False, True

    assert worker.run_all() == ["SUCCESS"]  # it is not put back
    assert ran == ["running 1", "after running 1", "running 2", "after running 2"]


def test_no_older_message_runs_when_the_newest_has_waited_for_too_long(make, worker):
    """
    The newest message of a pending call is dropped after ``wait_for``. An older one with a longer countdown, whose
    callers know of the revocation, does not run in its place. C60 C96
    """
    ran, calls, messages = [], [], []

    def body(self, shop_id):
        ran.append(self.request.args[1])
        if ran == ["running"]:
            task.apply_async((7, "older"), countdown=600)
            calls.append(task.delay(7, "newest"))
            messages.extend([worker.take(), worker.take()])
            assert worker.run(messages[1]) == "IGNORED"

    task = make(body, on_duplicate="replace", wait_for=0)
    task.delay(7, "running")
    worker.run()

    assert calls[0].state == "REVOKED"
    assert worker.run(messages[0]) == "IGNORED"
    assert (ran, names()) == (["running"], set())


@pytest.mark.parametrize("strategy", ["rerun", "replace"])
def test_no_task_takes_over_the_pending_call_of_another(make, worker, strategy):
    """
    Two tasks of one group are called during a run. Each has a run of its own, under an id of its own. C13 C96
    """
    ran, calls = [], []

    def body(self, shop_id):
        ran.append((self.name, self.request.args[1]))
        if not calls:
            calls.extend([one.delay(7, "a"), two.delay(7, "a"), two.delay(7, "b")])

    one = make(body, name="shop.one", group="shop", on_duplicate=strategy)
    two = make(body, name="shop.two", group="shop", on_duplicate=strategy)
    one.delay(7, "running")
    worker.run()
    worker.run_all()

    assert len({call.id for call in calls}) == 3
    assert all(call.accepted and call.duplicate for call in calls)
    assert sorted(ran[1:]) == [("shop.one", "a"), ("shop.two", "a"), ("shop.two", "b")]
    assert [call.state for call in calls] == ["SUCCESS"] * 3
    assert names() == set()


@pytest.mark.parametrize("strategy", ["rerun", "replace"])
def test_record_ends_when_its_message_expires(make, worker, strategy):
    """
    A message that waits for its turn expires before ``queue_ttl`` is over. Its record does not outlast it, because a
    broker may drop the message, and later calls would join it. C29 C96
    """
    left = []

    def body(self, shop_id):
        if not left:
            task.apply_async((7, "later"), expires=60)
            assert worker.run() == "IGNORED"
            left.append(peek("default", f"next:{NAME}").left)

    task = make(body, on_duplicate=strategy)
    task.delay(7, "running")
    worker.run()

    assert 0 < left[0] <= 60
