"""The pending call: messages that end without a run, calls that find a revoked one, nodes that disagree."""

from functools import partial
from typing import Any

import pytest

from django_redlock import QuorumUnavailableError, locks
from django_redlock.core.names import Owner, encode
from django_redlock.core.protocol import Failure, Release
from django_redlock.engine.manager import fresh_secret
from django_redlock.nodes.base import LinkError
from django_redlock.singleton.driver import Nodes
from django_redlock.singleton.pending import begin, look_up
from django_redlock.singleton.slot import Record, Seen
from tests.managers import wait_until

from .slots import NAME, names, ticket_in

# Revoked before its time


def test_call_does_not_wait_for_a_revoked_retry(make, worker):
    """A retry with a countdown was revoked. Calls that come later take the slot that was kept for it."""

    def body(self, shop_id):
        if worker.values == ["retried"]:
            raise self.retry(countdown=7200)

    task = make(body, on_duplicate="replace")
    first = task.delay(7, "retried")
    worker.run()
    task.backend.mark_as_revoked(first.id, "by an operator")
    worker.take()

    again = task.delay(7, "next")

    assert (again.duplicate, worker.run()) == (False, "SUCCESS")
    assert worker.values == ["retried", "next"]


# Nodes that disagree, because they were away at different times


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

    assert {call.id for call in calls} == {calls[0].id}
    assert [call.accepted for call in calls] == [True, True, False]
    assert worker.values == ["running", "newer"]


def test_no_task_takes_over_the_pending_call_of_another(make, worker):
    """Two tasks of one group are called during a run. Each has a run of its own, under an id of its own."""
    ran, calls = [], []

    def body(self, shop_id):
        ran.append((self.name, self.request.args[1]))
        if not calls:
            calls.extend([one.delay(7, "a"), two.delay(7, "a"), two.delay(7, "b")])

    one = make(body, name="shop.one", group="shop", on_duplicate="rerun")
    two = make(body, name="shop.two", group="shop", on_duplicate="rerun")
    one.delay(7, "running")
    worker.run()
    worker.run_all()

    assert len({call.id for call in calls}) == 3
    assert all(call.accepted and call.duplicate for call in calls)
    assert sorted(ran[1:]) == [("shop.one", "a"), ("shop.two", "a"), ("shop.two", "b")]
    assert [call.state for call in calls] == ["SUCCESS"] * 3
    assert names() == set()


# A key that is not a string


@pytest.fixture
def servers(nodes, settings):
    """Three real servers under the default alias, which have just started."""
    about = {"NODES": nodes.urls[:3], "OPTIONS": {"restart_guard": False, "node_timeout": 1.0}}
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


def test_key_that_is_not_a_string_keeps_nobody_from_running(servers, make, worker):
    """A message runs though one node has a list in place of its slot, and ``release()`` finds nothing to free there."""
    task = make()
    task.delay(7)
    own = worker.take()
    lose(NAME, *servers)
    task.delay(7)
    worker.take()
    spoil(NAME, servers[1])
    lose(NAME, servers[2])

    assert worker.run(own) == "SUCCESS"
    assert worker.shops == [7]
    servers[0].freeze()
    assert task.singleton.release(7, since=None, force=True) == "expired"
    assert task.singleton.holder(7) is None


@pytest.mark.parametrize(
    ("number", "counts"), [("1", True), ("999999999", True), ("1000000000", False), ("²", False), ("-1", False)]
)
def test_number_of_a_record_has_nine_digits_at_most(number, counts):
    """What is no number of a message, or one that nobody reaches, describes no pending call."""
    value = encode(fresh_secret(), Owner(kind="task", label="shop.sync", ref="id", call=f"{number}.0123456789"))

    assert Seen(value, 5.0, 3).record == (Record("id", "0123456789", int(number), "shop.sync") if counts else None)


def test_error_about_a_record_says_what_each_node_has(make, worker, memory_nodes, monkeypatch):
    """A record that cannot be freed when its message begins, or stays split when another call comes, is an error."""
    task = make(on_duplicate="replace", on_unavailable={"enqueue": "raise"})
    call = task.delay(7, "first")
    nodes, ticket = Nodes("default", task.name), ticket_in(worker.headers[0])

    def execute(request, *mark, execute):
        if isinstance(request, Release):
            raise LinkError(Failure.REFUSED)
        return execute(request, *mark)

    for node in memory_nodes[1:]:
        monkeypatch.setattr(node, "execute", partial(execute, execute=node.execute))

    with pytest.raises(QuorumUnavailableError, match="2 of 3 nodes must answer") as caught:
        nodes.run(begin(nodes.run(look_up(ticket)), task.singleton_options))
    still = f"queued as task {call.id}"
    assert caught.value.nodes == {"a": "free", "b": still, "c": still}
    memory_nodes[2].down = True
    with pytest.raises(QuorumUnavailableError, match="2 of 3 nodes must answer") as caught:
        task.delay(7, "second")
    assert caught.value.nodes == {"a": "free", "b": still, "c": "refused"}
