"""What the soak takes for evidence that the broker lost a message, and not this package."""

import os

import pytest

from tests.lab.soak.leftovers import Loss, Slot
from tests.lab.soak.records import Records

NODES = ("a", "b", "c")


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.setenv("SOAK_BROKER", "memory://")
    monkeypatch.setattr(Loss, "gone", lambda loss, task: True)
    return Records(tmp_path / "records.sqlite3")


def play(book, *events):
    """Record events: ``sent 0`` (of an attempt), ``noted 0 x`` (of an attempt, with a tag), ``acknowledged x``."""
    for event, *about in map(str.split, events):
        if event == "sent":
            book.sent("task", int(about[0]))
        elif event == "noted":
            book.broker(about[1], "task", int(about[0]), "noted")
        else:
            book.broker(about[0], "", 0, "acknowledged")


@pytest.mark.parametrize(
    ("events", "lost"),
    [
        (["sent 0"], True),
        (["sent 0", "noted 0 x"], True),
        (["sent 0", "noted 0 x", "sent 1", "acknowledged x"], True),
        (["sent 0", "noted 0 x", "sent 0", "acknowledged x"], True),
        (["sent 0", "noted 0 x", "noted 0 x", "sent 0", "acknowledged x"], True),  # a restored message's copy
        (["sent 0", "noted 0 x", "acknowledged x"], False),
        (["sent 0", "noted 0 x", "sent 1", "acknowledged x", "noted 1 y", "acknowledged y"], False),
        (["sent 0", "noted 0 x", "sent 0", "acknowledged x", "noted 0 y", "acknowledged y"], False),
    ],
)
def test_loss_by_the_broker(book, events, lost):
    """
    A message that no worker has noted, and that the broker does not have, is lost by the broker. If workers have
    acknowledged all messages of a call that never ended, the soak fails.
    """
    play(book, *events)
    running = [Slot(node, "{task:work:key=7}", "task", False, 5.0) for node in range(3)]

    assert bool(Loss(book).proof("task", [] if lost else running, NODES)) is lost


@pytest.mark.parametrize(
    ("on", "killed", "missed"),
    [([2], True, True), ([2], False, False), ([1, 2], True, False)],
    ids=["missed", "its process lived", "still a slot"],
)
def test_entry_that_a_node_kept_is_explained_by_a_killed_process(book, on, killed, missed):
    """One node missed a release, and the process that would have sent it again was killed. Otherwise it is an error."""
    run = book.began(7, "task")
    book.seen(run, ended=True)
    slots = [Slot(node, "{task:7}", "task", queued=True, seconds=3000) for node in on]

    assert slots[0].missed(slots, NODES, book.last_doer("task"), {os.getpid()} if killed else set()) == missed
