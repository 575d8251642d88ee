"""What ``task.singleton`` reports while the nodes disagree, and what listings show of notes."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from django_redlock import QuorumUnavailableError, lock
from django_redlock.core.names import Owner, encode
from django_redlock.engine.manager import fresh_secret
from django_redlock.inventory import held_locks
from django_redlock.singleton.driver import Nodes
from django_redlock.singleton.questions import Look, WriteBack

from .slots import NAME, names, set_down


def test_split_slot_is_not_reported_as_free(make, memory_nodes):
    """One node has a slot, one has nothing, one does not answer: the error has all that, and ``release()`` frees it."""
    task = make()
    memory_nodes[2].down = True
    task.delay(7)
    memory_nodes[2].down, memory_nodes[1].down = False, True

    for ask in (task.singleton.holder, task.singleton.is_locked, task.singleton.cancel):
        with pytest.raises(QuorumUnavailableError, match="must answer in time and agree, and too few did") as caught:
            ask(7)
        nodes = caught.value.nodes
        assert (nodes["a"][:14], nodes["c"]) == ("queued as task", "free")
        assert (caught.value.name, caught.value.needed) == (NAME, 2)
    text = task.singleton.explain(7)
    assert "would take the slot" not in text
    assert "Too few nodes answer and agree" in text
    assert task.singleton.release(7) == "unknown"

    memory_nodes[1].down = False
    assert names() == set()
    assert task.singleton.holder(7) is None


def test_split_record_is_settled(make, worker, memory_nodes):
    """Of two messages of one call, each known to one node that answers, the older ends, and a caller sees the newer."""
    calls = []
    first, _, third = memory_nodes

    def body(self, shop_id):
        if worker.values == ["running"]:
            calls.append(task.delay(7, "older"))
            third.down = True
            calls.append(task.delay(7, "newer"))
            third.down, first.down = False, True

    task = make(body, on_duplicate="rerun")
    task.delay(7, "running")
    worker.run()
    calls.append(task.delay(7, "newer"))
    worker.run_all()

    assert [(call.id, call.accepted) for call in calls] == [(calls[0].id, accepted) for accepted in (True, True, False)]
    assert worker.values == ["running", "newer"]


def test_value_is_written_back_unless_nodes_have_another(make, memory_nodes):
    """A quorum that has another value refuses an older one; too few answers are an error."""
    make().delay(7)
    nodes = Nodes("default", "shop.sync")
    (seen,) = nodes.look(Look((NAME,)))
    other = replace(seen, value=encode(fresh_secret(), Owner()))

    assert [nodes.write_back(WriteBack(NAME, each)) for each in (seen, other)] == [True, False]
    set_down(memory_nodes)
    with pytest.raises(QuorumUnavailableError):
        nodes.write_back(WriteBack(NAME, seen))


@pytest.mark.server
def test_key_of_another_type_names_no_holder(nodes, settings, make, worker):
    """A message runs though one node has a list in place of its slot, and ``release()`` finds nothing to free there."""
    options = {"restart_guard": False, "node_timeout": 1.0}
    settings.REDLOCK = {"default": {"NODES": nodes.urls[:3], "OPTIONS": options}}
    waiting = encode(fresh_secret(), Owner(kind="task", label="shop.sync", ref="mine", state="queued"))
    with nodes[0].client() as first, nodes[1].client() as second:
        first.set(f"redlock:{{{NAME}}}:h", waiting, ex=60)
        second.rpush(f"redlock:{{{NAME}}}:h", "not a lock")
    task = make()
    task.apply_async((7,), task_id="mine")

    assert worker.run() == "SUCCESS"
    assert task.singleton.release(7, since=None, force=True) == "expired"
    assert task.singleton.holder(7) is None


def listed(*options):
    """Return the output of ``redlock_list``, and the names in it."""
    out = StringIO()
    call_command("redlock_list", *options, stdout=out)
    names = {held.name for held in held_locks().locks}
    return out.getvalue(), names


def test_notes_are_listed_apart_from_locks(make, worker):
    """The notes of tasks on the nodes are no held locks: listings count them, and show them on request."""
    task = make(on_duplicate="rerun", acks_late=True)
    call = task.delay(7)
    task.apply_async((8,), task_id="waits")
    with lock("report:7"):
        worker.run_all()
        again = task.delay(7, since=1)
        text, locks_held = listed("--format=table")
        notes, _ = listed("--notes", "--format=csv")

    assert locks_held == {"report:7", NAME}
    assert "done:" not in text
    assert f"{call.id}:0" in notes
    assert "report:7" not in notes
    assert "Notes of singleton tasks, which hold no lock: 2. List them with --notes." in text
    assert again.accepted


def test_node_forgets_a_note_as_a_whole(make, worker, memory_nodes, monkeypatch):
    """A node remembers the fencing token of a note no longer than the note: the name of a note is used once."""
    asked: list[Any] = []
    for node in memory_nodes:
        execute = node.execute
        monkeypatch.setattr(
            node, "execute", lambda request, *mark, do=execute: asked.append(request) or do(request, *mark)
        )
    task = make(acks_late=True, on_duplicate="replace")
    task.delay(7)
    task.delay(7)
    worker.run_all()

    taken = [request for request in asked if type(request).__name__ == "Acquire"]
    keeps = {request.slugs[0].partition(":")[0]: (request.keep, request.ttl) for request in taken}
    assert keeps["{done"] == (60.0, 60.0)
    assert keeps["{began"] == (3600.0, 3600.0)
    assert keeps["{task"] == (3600.0, 30.0)
