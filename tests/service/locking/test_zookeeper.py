"""A ZooKeeper ensemble as a node: its decisions, its clock, its notifications, its users and its certificates."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_redlock import locks
from django_redlock.core.node_state import NodeState
from django_redlock.core.protocol import ENDLESS, POSITIVE, SHARED, Failure, Kind, Release, Request, Survey
from django_redlock.engine.manager import LockManager
from django_redlock.inventory.doctor import diagnose
from django_redlock.nodes import NodeSpec, open_node
from django_redlock.nodes.base import LinkError
from django_redlock.nodes.records import replicated
from django_redlock.nodes.records.record import Names, load
from django_redlock.testing.servers import reserve_port
from tests.certificates import Certificates
from tests.conftest import needs
from tests.managers import patient_manager
from tests.server.locking.test_database import SECRET, acquire, requests
from tests.zookeeper import Zoo

from .test_replicated import between, comparable, readable

if find_spec("kazoo"):
    from django_redlock.nodes.zookeeper import node as tables
    from django_redlock.nodes.zookeeper.client import Change, Client
    from django_redlock.nodes.zookeeper.node import ZookeeperNode, ZookeeperTable
else:
    pytestmark = pytest.mark.skip("needs kazoo: pip install django-redlock[zookeeper]")


def node(url: str, prefix: str = "t:", **options: Any) -> "ZookeeperNode":
    found = open_node(NodeSpec(url, options=options), prefix)
    assert isinstance(found, ZookeeperNode)
    return found


@pytest.fixture
def table(zookeeper: Zoo) -> Iterator["ZookeeperTable"]:
    """The records of one ZooKeeper, empty."""
    with closing(node(zookeeper.url).table(30.0)) as found:
        found.open()
        yield found


@pytest.fixture
def other(zookeeper: Zoo) -> Iterator["ZookeeperTable"]:
    """The same records over another connection, as in another process."""
    with closing(node(zookeeper.url).table(30.0)) as found:
        found.open()
        yield found


@pytest.fixture
def one(zookeeper: Zoo) -> Iterator[LockManager]:
    """A manager whose only node is a ZooKeeper."""
    with closing(patient_manager([zookeeper.url])) as manager:
        yield manager


# The same replies


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequence=st.lists(requests, min_size=1, max_size=25), together=st.booleans())
def test_zookeeper_answers_as_the_node_in_memory(
    zookeeper: Zoo, table: "ZookeeperTable", sequence: list[Request], together: bool
):
    """
    Whatever requests come in whatever order, at once or one by one, replies and queues are the same.
    """
    zookeeper.clear()
    store = NodeState(time.time)
    if together:
        sequence = [request for request in sequence if not isinstance(request, Survey)]
    expected = [comparable(store.execute(request)) for request in sequence]
    batches = [sequence] if together and sequence else [[request] for request in sequence]
    answers = [comparable(reply) for batch in batches for reply in table.execute(batch)]

    assert answers == expected
    for slug in ("{x}", "{y}", "{z}", "{queue}"):
        known = load(Names({slug}, set()), table.key, table.read)
        assert known.store.waiters(slug) == store.waiters(slug)


def test_refusal_is_confirmed_by_a_write(
    table: "ZookeeperTable", other: "ZookeeperTable", monkeypatch: pytest.MonkeyPatch
):
    """A deposed leader still answers reads, so a refusal counts only in the era in which it was decided."""
    other.execute([acquire(secret="b" * 32)])

    def change_eras() -> None:
        other.execute([Release(("{x}",), "b" * 32)])
        other.connection.write([Change("/t:/era", tables.dump(other._era.dump()), -1)])

    between(table, monkeypatch, change_eras)

    assert table.execute([acquire()])[0].kind in POSITIVE


def test_stale_write_after_delete_and_create_fails(
    table: "ZookeeperTable", other: "ZookeeperTable", monkeypatch: pytest.MonkeyPatch
):
    """Versions begin anew when a record is created again; a write that has read before must not succeed."""
    monkeypatch.setattr(replicated, "CLEANING", -100.0)
    other.execute([acquire(ttl=0.01, keep=0.01)])

    def delete_and_create() -> None:
        for _ in range(10):
            other._clean_at = 0.0
            other.clean()
        assert other.connection.get([other.key("h", "{x}")]) == [None]
        other.execute([acquire(secret="b" * 32)])

    between(table, monkeypatch, delete_and_create)

    assert table.execute([acquire()])[0].kind is Kind.BUSY


def test_many_names_and_holders_fit_into_transactions(table: "ZookeeperTable"):
    """Very many names go in parts, and the end of very many holds is one transaction."""
    slugs = tuple(f"{{n{number}}}" for number in range(450))
    (taken,) = table.execute([acquire(slugs=slugs)])
    (refused,) = table.execute([acquire("n449", "b" * 32)])
    sharers = [acquire(secret=f"{number:032}", value=f"{number:032}" + "{}", shared=True) for number in range(150)]
    table.execute(sharers)
    (released,) = table.execute([Release(("{x}",), SHARED, 60.0, shared=True)])
    (late,) = table.execute([sharers[0]])

    assert [reply.kind for reply in (taken, refused)] == [Kind.ACCEPTED, Kind.BUSY]
    assert [reply.kind for reply in (released, late)] == [Kind.RELEASED, Kind.CANCELLED]


def test_requests_that_are_too_large_together_are_carried_out_alone(table: "ZookeeperTable"):
    """ZooKeeper closes the connection when a transaction has more than a megabyte."""
    large = [acquire(f"n{number}", f"{number:032}", value=f"{number:032}" + "x" * 30_000) for number in range(40)]
    together = table.execute(large)
    (alone,) = table.execute([acquire("big", value=SECRET + "x" * 1_000_000)])

    assert {reply.kind for reply in together} == {Kind.ACCEPTED}
    assert (alone.kind, alone.failure) == (Kind.FAILED, Failure.BACKLOG)
    assert table.execute([acquire("small")])[0].kind is Kind.ACCEPTED


def test_survey_lists_page_by_page_what_is_held(table: "ZookeeperTable", monkeypatch: pytest.MonkeyPatch):
    """Each lock is on one page; locks that have ended are left out, and nothing is without an end."""
    monkeypatch.setattr(tables, "PAGE", 2)
    table.execute([acquire(f"n{number}", f"{number:032}") for number in range(30)])
    table.execute([acquire("n1x", ttl=-5.0)])

    pages, cursor = [], ""
    while cursor or not pages:
        (reply,) = table.execute([Survey(after=cursor, size=7)])
        cursor = reply.cursor
        pages.append([row.slug for row in reply.rows])
    (last,) = table.execute([Survey(after=ENDLESS, size=3)])

    listed = [slug for page in pages for slug in page]
    assert sorted(listed) == sorted(f"{{n{number}}}" for number in range(30))
    assert all(len(page) <= 7 for page in pages)
    assert (reply.total, last.rows) == (31, ())


def test_records_that_nobody_needs_are_deleted(
    zookeeper: Zoo, table: "ZookeeperTable", monkeypatch: pytest.MonkeyPatch
):
    """Expired records no longer count and are deleted in time; tokens that are kept for ever stay."""
    monkeypatch.setattr(replicated, "CLEANING", -100.0)  # so that everything but what is kept for ever is over
    table.execute(
        [acquire("short", ttl=0.01, keep=0.01), acquire("ever", ttl=0.01, keep=None), Release((), SECRET, 0.01)]
    )
    for _ in range(10):
        table._clean_at = 0.0
        table.clean()

    assert zookeeper.records() == [table.key("h", "{ever}")]


def test_doctor_examines_members(zookeeper: Zoo):
    """The trial of the doctor succeeds; a member that is gone, one that is alone and a short ttl are findings."""
    gone = reserve_port(zookeeper)
    options = {"ttl": 5.0, "node_timeout": 1.0}
    url = f"{zookeeper.url},127.0.0.1:{gone}"
    with override_settings(REDLOCK={"default": {"NODES": url, "OPTIONS": options}}):
        found = diagnose(timeout=30.0)
        locks.reset()

    assert {finding.id for finding in found.findings} == {
        *("zookeeper-election", "zookeeper-member", "zookeeper-alone", "redlock.W001")
    }
    assert found.nodes[0].facts["version"] >= "3.4"
    assert found.nodes[0].round_trip > 0


# The clock of the leader


def test_restarted_zookeeper_keeps_locks(table: "ZookeeperTable", zookeeper: Zoo):
    """It writes to disk before it replies."""
    table.execute([acquire(ttl=60.0)])
    zookeeper.stop()
    zookeeper.start()

    assert table.execute([acquire(secret="b" * 32)])[0].kind is Kind.BUSY


@pytest.mark.parametrize("said", [0, -1, 2**62])
def test_time_that_cannot_be_one_is_not_believed(table: "ZookeeperTable", monkeypatch: pytest.MonkeyPatch, said: int):
    """No number that comes from a node is taken on trust."""
    monkeypatch.setattr(
        "django_redlock.nodes.zookeeper.client.numbers", lambda stat: (stat.version, stat.mzxid, said, 0)
    )
    monkeypatch.setattr(table, "now", count(step=10.0).__next__)  # no time for another attempt
    (reply,) = table.execute([acquire()])

    assert (reply.kind, reply.failure) == (Kind.FAILED, Failure.MALFORMED)


def test_vote_counts_only_in_the_era_in_which_it_was_decided(
    table: "ZookeeperTable", other: "ZookeeperTable", monkeypatch: pytest.MonkeyPatch
):
    """If the leader has changed before the write, its outcome is unknown; the next request begins an era."""
    from django_redlock.nodes.zookeeper import client

    numbers = client.numbers

    def elected(stat: Any) -> Any:
        return numbers(stat)[0], numbers(stat)[1] + (1 << 32), *numbers(stat)[2:]

    table.execute([acquire("y")])
    monkeypatch.setattr(client, "numbers", elected)
    (reply,) = table.execute([acquire()])
    (later,) = table.execute([acquire("z")])

    assert (reply.kind, reply.failure, later.kind) == (Kind.UNKNOWN, Failure.LEADER_CHANGED, Kind.ACCEPTED)
    assert table._era.name == "1"


def test_vote_does_not_count_if_its_reply_shows_that_the_clock_was_set(
    table: "ZookeeperTable", other: "ZookeeperTable", monkeypatch: pytest.MonkeyPatch
):
    """The hold was written to end by the clock before the jump, so for others it may have ended already."""
    from django_redlock.nodes.zookeeper import client

    numbers = client.numbers
    table.execute([acquire("y")])
    monkeypatch.setattr(
        client, "numbers", lambda stat: (*numbers(stat)[:2], numbers(stat)[2] + 60_000, numbers(stat)[3])
    )
    (reply,) = table.execute([acquire()])
    (taken,) = other.execute([acquire(secret="b" * 32)])

    assert reply.kind is Kind.UNKNOWN
    assert taken.kind in POSITIVE


# Notifications


def test_first_waiter_is_notified_of_a_release(table: "ZookeeperTable", zookeeper: Zoo):
    """The name of the waiter arrives on the connection of its process, and the end of the watch is noticed."""
    with (
        closing(node(zookeeper.url).listen("p", 30.0, print)) as link,
        closing(node(zookeeper.url).listen("q", 30.0, print)) as no,
    ):
        for number in range(3):
            name = f"n{number}"
            table.execute([acquire(name), acquire(name, "b" * 32, waiter=f"p|{number}", stamp=1)])
            table.execute([Release((f"{{{name}}}",), SECRET)])
            assert readable(link)
            assert link.read() == [f"p|{number}"]
        assert no.read() == []
        with closing(node(zookeeper.url).listen("p", 30.0, print)):  # once more, before the other session has ended
            assert readable(link)
        zookeeper.kill()
        assert readable(no)
        with pytest.raises(LinkError):
            no.read()
    zookeeper.start()


# Users and certificates


def test_records_belong_to_the_user(zookeeper: Zoo):
    """The path is created at first use; nobody else reads what is below it. No error shows a password."""
    host = zookeeper.url.removeprefix("zookeeper://")
    ours = f"zookeeper://app:p%40ss@{host}/teams/locks"
    with closing(patient_manager([ours])) as manager:
        lease = manager.lock("a", wait=0).acquire()
        with closing(node(ours).listen("p", 30.0, print)) as link:
            assert link.read() == []
        for url, failure in (
            (f"zookeeper://{host}/teams/locks", Failure.NOAUTH),
            (f"zookeeper://app:wrong@{host}/teams/locks", Failure.NOPERM),
        ):
            with pytest.raises(LinkError, match="for /teams/locks") as refused:
                node(url).connect(30.0)
            assert refused.value.failure is failure
        assert lease.release() == "released"
    with zookeeper.client() as client:
        client.add_auth("digest", "app:p@ss")
        client.delete("/teams", recursive=True)


JAAS = """
Server {{ org.apache.zookeeper.server.auth.DigestLoginModule required user_app="p@ss"; }};
"""


@pytest.fixture(scope="module")
def guarded(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    """A ZooKeeper that knows a user by SASL, and wants certificates on its second port."""
    folder = tmp_path_factory.mktemp("zookeeper")
    (folder / "jaas").write_text(JAAS.format())
    (folder / "server.pem").write_text(certificates.pkcs8("server") + Path(certificates["server.crt"]).read_text())
    (folder / "ca.pem").write_text(Path(certificates["ca.crt"]).read_text())
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    with Zoo() as zoo:
        if not zoo.ours:
            pytest.skip("REDLOCK_ZOOKEEPER names a server whose users are not ours to change")
        zoo.stop()
        zoo.secure_port = reserve_port(zoo)
        zoo.lines = (
            f"secureClientPort={zoo.secure_port}",
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
            f"ssl.keyStore.location={folder}/server.pem",
            f"ssl.trustStore.location={folder}/ca.pem",
            "authProvider.1=org.apache.zookeeper.server.auth.SASLAuthenticationProvider",
        )
        zoo.java = (f"-Djava.security.auth.login.config={folder}/jaas",)
        zoo.start()
        yield zoo


def test_user_of_sasl(guarded: Zoo):
    """Records belong to the user; a wrong password is named."""
    needs("pure-sasl", find_spec("puresasl"), "pip install kazoo[sasl]")
    host = guarded.url.removeprefix("zookeeper://")
    query = "sasl_mechanism=DIGEST-MD5"
    with closing(patient_manager([f"zookeeper://app:p%40ss@{host}/sasl?{query}"])) as manager:
        assert manager.lock("a", wait=0).acquire().release() == "released"
    for url, failure in (
        (f"zookeeper://{host}/sasl", Failure.NOAUTH),
        (f"zookeeper://app:wrong@{host}/sasl?{query}", Failure.WRONGPASS),
    ):
        with pytest.raises(LinkError) as refused:
            node(url).connect(30.0)
        assert refused.value.failure is failure


def test_client_certificate(guarded: Zoo, certificates: Certificates):
    """Zookeepers:// verifies the members and shows a certificate; otherwise the reason is named."""
    files = {"ssl_ca_certs": certificates["ca.crt"]}
    ours = {**files, "ssl_certfile": certificates["client.crt"], "ssl_keyfile": certificates["client.key"]}
    url = f"zookeepers://127.0.0.1:{guarded.secure_port}/tls"
    found = node(url, **ours)
    with closing(LockManager([found], patient_manager(["memory://x"]).rules)) as manager:
        assert manager.lock("a", wait=0).acquire().release() == "released"
        assert found.inspect(30.0)[1]["version"]
    for wrong, failures in (
        (files, (Failure.NO_CLIENT_CERTIFICATE, Failure.RESET, Failure.NO_LEADER, Failure.TLS_FAILED)),
        ({}, (Failure.CERTIFICATE_REFUSED,)),
    ):
        with pytest.raises(LinkError) as refused:
            node(url, **wrong).connect(30.0)
        assert refused.value.failure in failures


# Processes


def test_member_that_accepts_and_is_silent_is_left_at_once(monkeypatch: pytest.MonkeyPatch):
    """A frozen member still accepts connections; kazoo would wait for the length of a session."""
    monkeypatch.setattr("django_redlock.nodes.zookeeper.client.SESSION", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(node(f"zookeeper://127.0.0.1:{silent.getsockname()[1]}").place, 0, 0.2)
        with pytest.raises(TimeoutError):
            client.open()
        began = time.monotonic()
        client.close()

    assert time.monotonic() - began < 30
