"""The pending call: messages that end without a run, calls that find a revoked one, nodes that disagree."""

from typing import Any

import pytest

from django_redlock import QuorumUnavailableError, locks
from django_redlock.celery.pending import PendingMessage, TrailingCall
from django_redlock.core.names import Owner, encode, slug
from django_redlock.core.protocol import Failure, Release
from django_redlock.engine.manager import fresh_secret
from django_redlock.nodes.base import LinkError
from django_redlock.singleton.slots import Record, Seen, peek
from tests.managers import wait_until

from .slots import NAME, die, names, ticket_in

NEXT = f"next:{NAME}"


def test_no_older_message_runs_when_the_child_of_the_newest_died(make, worker, received):
    """A child dies before it begins the newest message. Its caller sees that, and no older message runs."""
    ran = []
    task = make(lambda self, shop_id: ran.append(shop_id), on_duplicate="replace")
    task.delay(7, "older")
    call = task.delay(7, "newest")
    older, newest = worker.take(), worker.take()

    die(received(task, newest))

    assert worker.run(older) == "IGNORED"
    assert (ran, call.state, names()) == ([], "FAILURE", set())


# Revoked before its time


@pytest.mark.parametrize("cancelled", [False, True])
def test_no_message_of_a_revoked_call_runs_later(make, worker, cancelled):
    """A pending call was revoked or cancelled while no worker could know, and made way. None of its messages runs."""
    ran = []
    task = make(lambda self, shop_id: ran.append(self.request.args[1]), on_duplicate="replace")
    task.delay(7, "older")
    first = task.apply_async((7, "newest"), countdown=7200)
    older, newest = worker.take(), worker.take()

    if cancelled:
        task.singleton.cancel(7)
    else:
        task.backend.mark_as_revoked(first.id, "by an operator")
    task.delay(7, "next")
    worker.run_all()

    assert (worker.run(older), worker.run(newest)) == ("IGNORED", "IGNORED")
    assert (ran, first.state, names()) == (["next"], "REVOKED", set())


@pytest.mark.parametrize("scope", ["until_executed", "until_executing", "until_and_while_executing"])
@pytest.mark.parametrize("strategy", ["rerun", "replace"])
def test_waiting_call_that_was_revoked_is_out_of_the_way(make, worker, strategy, scope):
    """A call with a countdown was revoked while nothing runs. The next call runs at once."""
    ran = []
    task = make(lambda self, shop_id: ran.append(self.request.args[1]), on_duplicate=strategy, scope=scope)
    first = task.apply_async((7, "same"), countdown=7200)
    task.backend.mark_as_revoked(first.id, "by an operator")
    worker.take()

    again = task.delay(7, "same")

    assert (again.id != first.id, again.accepted, again.duplicate) == (True, True, False)
    assert worker.run() == "SUCCESS"
    assert (ran, names()) == (["same"], set())


def test_call_does_not_wait_for_a_revoked_retry(make, worker):
    """A retry with a countdown was revoked. Calls that come later take the slot that was kept for it."""
    ran = []

    def body(self, shop_id):
        ran.append(self.request.args[1])
        if ran == ["retried"]:
            raise self.retry(countdown=7200)

    task = make(body, on_duplicate="replace")
    first = task.delay(7, "retried")
    worker.run()
    task.backend.mark_as_revoked(first.id, "by an operator")
    worker.take()

    again = task.delay(7, "next")

    assert (again.duplicate, worker.run()) == (False, "SUCCESS")
    assert ran == ["retried", "next"]


# Nodes that disagree, because they were away at different times


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
    """A message that a newer one replaced never runs, even if only one node of those that answer has the newer one."""
    _, ran = split

    worker.run_all()

    assert ran == ["running", "newer"]


def test_caller_settles_a_split_record(split, worker):
    """
    A call that finds a record without a quorum for any value gets the id of the newest one, and its own arguments run.
    """
    sync, ran = split
    (pending,) = {headers["id"] for headers in worker.headers}

    same = sync.apply_async((7, "newer"))
    last = sync.apply_async((7, "last"))
    worker.run_all()

    assert (same.id, same.accepted, last.id) == (pending, False, pending)
    assert ran == ["running", "last"]


@pytest.mark.parametrize("strategy", ["rerun", "replace"])
def test_no_task_takes_over_the_pending_call_of_another(make, worker, strategy):
    """Two tasks of one group are called during a run. Each has a run of its own, under an id of its own."""
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


def test_node_without_the_run_does_not_refuse_the_record(make, worker, memory_nodes):
    """
    A message finds its slot taken, though free on one node that missed the run. A later call still finds the pending
    call, if that node has to confirm its record.
    """
    calls, ran = [], []
    first, _, third = memory_nodes

    def body(self, shop_id):
        ran.append(self.request.args[1])
        if len(ran) == 1:
            third.store.reset()  # as if it had missed the run
            third.down = True
            calls.append(task.delay(7, "newer"))
            third.down = False
            assert worker.run() == "IGNORED"  # it waits for the run
            first.down = True
            calls.append(task.delay(7, "newest"))
            first.down = False

    task = make(body, on_duplicate="replace")
    task.delay(7, "running")
    worker.run()
    worker.run_all()

    assert calls[0].id == calls[1].id
    assert ran == ["running", "newest"]


# A key that is not a string


@pytest.fixture
def servers(nodes, settings):
    """Three real servers under the default alias, which have just started."""
    about = {"NODES": nodes.urls[:3], "OPTIONS": {"restart_guard": False}}
    settings.REDLOCK = {"default": about}
    yield nodes[:3]
    locks.reset()


def spoil(name: str, *servers: Any) -> None:
    """Put a list under the key of a lock on some servers."""
    lose(name, *servers)
    for server in servers:
        with server.client() as client:
            client.rpush(f"redlock:{{{name}}}:h", "not a lock")


def lose(name: str, *servers: Any) -> None:
    """Remove the key of a lock from some servers, which have the confirmation of its claim: that would restore it."""
    key = f"redlock:{{{name}}}:h"
    for server in servers:
        with server.client() as client:
            wait_until(lambda client=client: '"state":"claimed"' not in (client.get(key) or ""))
            client.delete(key)


def test_key_that_is_not_a_string_is_no_record(servers, make, worker):
    """
    A list is in place of a pending call's record on one node, and a second one lost it. The next call takes the true
    record over.
    """
    ran, calls = [], []
    _, second, third = servers

    def body(self, shop_id):
        ran.append(self.request.args[1])
        if ran == ["running"]:
            calls.append(task.delay(7, "older"))
            spoil(NEXT, second)
            lose(NEXT, third)
            calls.append(task.delay(7, "newest"))

    task = make(body, on_duplicate="rerun")
    task.delay(7, "running")
    worker.run()
    worker.run_all()

    assert calls[0].id == calls[1].id
    assert ran == ["running", "newest"]


@pytest.mark.parametrize("force", [False, True])
def test_key_that_is_not_a_string_is_no_slot_to_release(servers, make, force):
    """``release()`` finds nothing to free where a list is in place of a slot, and does not report that it is taken."""
    task = make()
    spoil(NAME, servers[1])
    servers[0].freeze()

    assert task.singleton.release(7, since=None, force=force) == "expired"
    assert task.singleton.holder(7) is None


def test_key_that_is_not_a_string_keeps_nobody_from_running(servers, make, worker):
    """A message runs though one node has a list in place of its slot, and only one the slot of another message."""
    ran = []
    task = make(lambda self, shop_id: ran.append(shop_id))
    task.delay(7)
    own = worker.take()
    lose(NAME, *servers)
    task.delay(7)
    worker.take()
    spoil(NAME, servers[1])
    lose(NAME, servers[2])

    assert worker.run(own) == "SUCCESS"
    assert ran == [7]


def test_record_without_a_secret_is_not_written_back(make, memory_nodes):
    """Anybody would own a record that has no secret."""
    task = make(on_duplicate="rerun")
    call = TrailingCall(task, (7,), {}, {}, task.singleton_options, task.singleton_ticket("id", (7,), {}))

    assert call._write_back(Seen("", 5.0, 1)) is False
    assert not any(node.store.records.holders for node in memory_nodes)


@pytest.mark.parametrize(
    ("number", "counts"), [("1", True), ("999999999", True), ("1000000000", False), ("²", False), ("-1", False)]
)
def test_number_of_a_record_has_nine_digits_at_most(number, counts):
    """What is no number of a message, or one that nobody reaches, describes no pending call."""
    value = encode(fresh_secret(), Owner(kind="task", label="shop.sync", ref="id", call=f"{number}.0123456789"))

    assert Seen(value, 5.0, 3).record == (Record("id", "0123456789", int(number), "shop.sync") if counts else None)


# Each error about too few nodes has what each of them reported


def refuse(node: Any, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a node execute no requests of this kind."""
    execute = node.execute

    def refusing(request: Any) -> Any:
        if isinstance(request, kind):
            raise LinkError(Failure.REFUSED)
        return execute(request)

    monkeypatch.setattr(node, "execute", refusing)


def test_error_about_a_record_that_cannot_be_freed(make, worker, memory_nodes, monkeypatch):
    """The error names the nodes that still have the record of a message which is about to begin."""
    task = make(on_duplicate="replace")
    call = task.delay(7)
    message = PendingMessage.look_up(ticket_in(worker.headers[0]), task)
    for node in memory_nodes[1:]:
        refuse(node, Release, monkeypatch)

    with pytest.raises(QuorumUnavailableError, match="2 of 3 nodes must answer") as caught:
        message.begin()

    still = f"queued as task {call.id}"
    assert caught.value.nodes == {"a": "free", "b": still, "c": still}


def test_error_about_a_record_that_stays_split(split, worker, memory_nodes, monkeypatch):
    """The error names what each node has, if a record is still split after some repairs."""
    sync, _ = split
    pending = worker.headers[0]["id"]
    for node in memory_nodes:
        refuse(node, Release, monkeypatch)
    monkeypatch.setattr(TrailingCall, "_write_back", lambda call, seen: False)
    call = TrailingCall(sync, (7,), {}, {}, sync.singleton_options, sync.singleton_ticket("id", (7,), {}))

    with pytest.raises(QuorumUnavailableError, match="2 of 3 nodes must answer") as caught:
        call._settled(peek("default", NEXT))

    still = f"queued as task {pending}"
    # A release that a node missed is redelivered in the background, perhaps before the node refused releases.
    freed = slug(NEXT) not in memory_nodes[2].store.records.holders
    assert caught.value.nodes == {"a": "refused", "b": still, "c": "free" if freed else still}
