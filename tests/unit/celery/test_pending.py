"""The record of a pending call on nodes that disagree, because they were away at different times."""

import pytest


@pytest.fixture
def split(make, worker, memory_nodes):
    """
    A task with two messages of one pending call, of which the lock nodes that answer know one each.

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
