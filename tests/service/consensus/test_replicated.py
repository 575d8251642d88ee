"""What etcd and ZooKeeper have in common as nodes: decisions, notifications, processes, operators, majorities."""

import asyncio
import re
import select
import sys
import threading
from contextlib import closing, suppress
from io import StringIO
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_redlock import LockTakenError, QuorumUnavailableError, locks
from django_redlock.admin.pages import NodeRow, panels
from django_redlock.contrib.consensus import replicated
from django_redlock.core.protocol import ABSENT, SHARED, Failure, Kind, Release, Reply, Request, Survey
from django_redlock.inventory.doctor import diagnose
from django_redlock.nodes import NodeSpec
from django_redlock.nodes.backends import open_node
from django_redlock.nodes.base import LinkError
from django_redlock.testing.servers import reserve_port
from tests.etcd import Member
from tests.managers import (
    Flavour,
    eventually,
    fork_and_lock,
    patient_manager,
    run_greenlets,
)
from tests.server.locking.test_database import SECRET, acquire, agree, between, requests
from tests.zookeeper import Zoo

Store = Member | Zoo


def node(url: str) -> Any:
    return open_node(NodeSpec(url), "t:")


def comparable(reply: Reply) -> Any:
    """Return what must be equal: everything except times."""
    rows = [row._replace(left=None if row.left is None else row.left == ABSENT) for row in reply.rows]
    return reply.kind, reply.fence, bool(reply.left), reply.detail, reply.position, reply.terms, rows


def readable(link: Any) -> bool:
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    return bool(poll.poll(60_000))


def empty(store: Store) -> None:
    """Delete everything that the tests have written."""
    if isinstance(store, Member):
        store.clear()
        return
    with store.client() as client:
        for name in client.get_children("/"):
            if name != "zookeeper":
                client.delete(f"/{name}", recursive=True)


def listed(table: Any, size: int) -> list[list[str]]:
    """Return what a table lists, page by page."""
    pages, cursor = [], ""
    while cursor or not pages:
        (reply,) = table.execute([Survey(after=cursor, size=size)])
        cursor = reply.cursor
        pages.append([row.slug for row in reply.rows])
    return pages


def clean(table: Any) -> None:
    """Have a table delete all that is over."""
    for _ in range(10):
        table._clean_at = 0.0
        table.clean()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequence=st.lists(requests, min_size=1, max_size=25), together=st.booleans())
def test_store_answers_as_the_node_in_memory(store: Store, sequence: list[Request], together: bool):
    """Whatever requests come in whatever order, at once or one by one, replies and queues are the same."""
    with closing(open_node(NodeSpec(store.url), f"{uuid4()}:").table(30.0)) as own:
        own.open()
        agree(own, sequence, together, comparable)


def test_many_names_and_holders_fit_into_transactions(table: Any):
    """A store takes some operations at once, so very many names, and the end of very many holds, go in parts."""
    slugs = tuple(f"{{n{number}}}" for number in range(450))
    (taken,) = table.execute([acquire(slugs=slugs)])
    (refused,) = table.execute([acquire("n449", "b" * 32)])
    sharers = [acquire(secret=f"{number:032}", value=f"{number:032}" + "{}", shared=True) for number in range(150)]
    table.execute(sharers)
    (released,) = table.execute([Release(("{x}",), SHARED, 60.0, shared=True)])
    (late,) = table.execute([sharers[0]])

    assert [reply.kind for reply in (taken, refused)] == [Kind.ACCEPTED, Kind.BUSY]
    assert [reply.kind for reply in (released, late)] == [Kind.RELEASED, Kind.CANCELLED]


def test_requests_that_are_too_large_together_are_carried_out_alone(table: Any):
    """A store refuses a request with more than 1,000 or 1,500 kB, or closes the connection."""
    large = [acquire(f"n{number}", f"{number:032}", value=f"{number:032}" + "x" * 60_000) for number in range(40)]
    together = table.execute(large)
    (alone,) = table.execute([acquire("big", value=SECRET + "x" * 2_000_000)])

    assert {reply.kind for reply in together} == {Kind.ACCEPTED}
    assert (alone.kind, alone.failure) == (Kind.FAILED, Failure.BACKLOG)
    assert table.execute([acquire("small")])[0].kind is Kind.ACCEPTED


def test_records_that_nobody_needs_are_deleted(table: Any, store: Store, monkeypatch: pytest.MonkeyPatch):
    """Expired records no longer count and are deleted in time; tokens that are kept for ever stay."""
    monkeypatch.setattr(replicated, "CLEANING", -100.0)  # so that everything but what is kept for ever is over
    table.execute(
        [
            acquire("short", ttl=0.01, keep=0.01),
            acquire("ever", ttl=0.01, keep=None),
            acquire("short", "b" * 32, waiter="p|1", stamp=1),
            Release(("{short}",), SECRET, 0.01),
        ]
    )
    keys = [table.key("h", "{short}"), table.key("h", "{ever}"), table.key("x", SECRET)]
    if isinstance(store, Member):  # in ZooKeeper, the znode of a process that waits ends with its connection
        keys.append(table.key("w", "p"))
    assert sorted(table.read(keys)[1]) == sorted(keys)
    clean(table)

    assert list(table.read(keys)[1]) == keys[1:2]


def test_restarted_store_keeps_locks(table: Any, store: Store):
    """It writes to disk before it replies."""
    table.execute([acquire(ttl=60.0)])
    store.stop()
    store.start()

    assert table.execute([acquire(secret="b" * 32)])[0].kind is Kind.BUSY


async def test_first_waiter_is_notified_of_a_release(table: Any, store: Store):
    """The name of the waiter arrives on the connection of its process, and the end of the watch is noticed."""
    one, other = (node(store.url).listen(process, 30.0, print) for process in "pq")
    loop = await node(store.url).alisten("r", 30.0, print)
    with closing(one), closing(other), closing(loop):
        for number, process in enumerate("ppr"):
            name, waiter = f"n{number}", f"{process}|{number}"
            table.execute([acquire(name), acquire(name, "b" * 32, waiter=waiter, stamp=1)])
            table.execute([Release((f"{{{name}}}",), SECRET)])
            assert process == "r" or readable(one)
            assert (await asyncio.wait_for(loop.read(), 60) if process == "r" else one.read()) == [waiter]
        assert other.read() == []
        store.kill()
        assert readable(other)
        with pytest.raises(LinkError):
            other.read()
        with pytest.raises(LinkError):
            await asyncio.wait_for(loop.read(), 60)
    for process in "pq":
        with pytest.raises(LinkError):
            node(store.url).listen(process, 30.0, print)
    with pytest.raises(LinkError):
        await node(store.url).alisten("r", 30.0, print)
    await asyncio.to_thread(store.start)


def test_slower_of_two_decides_again(table: Any, other: Any, monkeypatch: pytest.MonkeyPatch):
    """Another client's write between our read and our write is not overwritten."""
    between(table, monkeypatch, lambda: other.execute([acquire(secret="b" * 32)]))

    assert table.execute([acquire()])[0].kind is Kind.BUSY


def test_connected_process_notices_that_the_store_was_emptied(table: Any, store: Store):
    """No connection ends, and another process has already written its own records, but locks are gone."""
    table.execute([acquire()])
    empty(store)
    with closing(node(store.url).table(30.0)) as later:
        later.open()
        later.execute([acquire("other")])
    with pytest.raises(LinkError) as lost:
        table.execute([acquire(secret="b" * 32)])

    assert lost.value.failure is Failure.RESTARTED


def test_doctor_and_panel_describe_it(store: Store):
    """Both show what the members are, the doctor a member that is gone, and both why none of them answers."""
    url = f"{store.url},127.0.0.1:{reserve_port(store)}"

    def described() -> tuple[str, NodeRow]:
        out = StringIO()
        with suppress(CommandError):
            call_command("redlock_doctor", stdout=out, timeout=30.0)
        (panel,) = panels()
        return out.getvalue(), panel.rows[0]

    with override_settings(REDLOCK={"default": {"NODES": url, "OPTIONS": {"ttl": 5.0, "node_timeout": 1.0}}}):
        found = {finding.id for finding in diagnose(timeout=30.0).findings}
        said, row = described()
        store.kill()
        locks.reset()
        gone, none = described()
        locks.reset()
        store.start()

    alone = {"zookeeper-alone"} if isinstance(store, Zoo) else set()
    assert found == {f"{store.scheme}-election", f"{store.scheme}-member", "redlock.W001", *alone}
    name = {"etcd": "etcd", "zookeeper": "ZooKeeper"}[store.scheme]
    assert re.search(rf": {name} \d+\.\d+\.\d+, round trip \d+\.\d ms", said)
    assert row.votes
    assert row.version.startswith(f"{name} ")
    assert row.round_trip.endswith(" ms")
    assert "refused\n" in gone
    assert not none.votes
    assert none.answers == "refused"
    assert "its port" in none.remedy


def test_survey_among_very_many_records_ends_early(table: Any, other: Any, monkeypatch: pytest.MonkeyPatch):
    """Requests of the process wait for it, so a page may have few locks; the next one goes on behind it."""
    monkeypatch.setattr(sys.modules[type(table).__module__], "PAGE", 5)
    table.execute([acquire(f"n{number:02}", f"{number:032}", ttl=-5.0) for number in range(30)])
    table.execute([acquire("held")])
    table.patience = 0.0
    pages = listed(table, 10)

    assert len(pages) > 3
    assert [slug for page in pages for slug in page] == ["{held}"]
    table.patience = 30.0
    assert [row.slug for row in table.execute([Survey(size=1)])[0].rows] == ["{held}"]


def test_members_of_one_store_are_not_several_nodes(store: Store):
    """A store that is listed once for each member has one vote, and the error says why."""
    again = store.url.replace("127.0.0.1", "localhost")
    with (
        closing(patient_manager([store.url, again])) as manager,
        pytest.raises(QuorumUnavailableError, match="is the same server as") as refused,
    ):
        manager.lock("a", wait=30).acquire()

    assert refused.value.misconfigured


# Processes


def test_child_has_connections_of_its_own(store: Store):
    """After a fork both processes continue; the child neither uses nor ends anything of its parent."""
    with closing(patient_manager([store.url])) as one:
        fork_and_lock(one)


def test_greenlets_wait_and_are_renewed(store: Store):
    """Under gevent, the thread of a node is a greenlet, and the watchdog renews from a thread of its own."""
    run_greenlets([store.url])


async def test_no_thread_is_left_behind(store: Store, flavour: Flavour):
    """The threads of a store end with the last manager that uses it."""
    manager = patient_manager([store.url])
    lease = await flavour.acquire(manager.lock("a"))
    with pytest.raises(LockTakenError):
        await flavour.acquire(manager.lock("a", wait=0.3))
    await flavour.release(lease)

    name = f"django_redlock {store.scheme}"
    await flavour.close(manager)
    manager.close()

    await eventually(lambda: not [one for one in threading.enumerate() if one.name.startswith(name)])
