"""A ZooKeeper ensemble as a node: its decisions, its clock, its notifications, its users and its certificates."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from django_redlock.contrib.consensus import replicated
from django_redlock.core.protocol import POSITIVE, Failure, Kind, Release, Survey
from django_redlock.nodes import NodeSpec
from django_redlock.nodes.backends import open_node
from django_redlock.nodes.base import LinkError
from django_redlock.testing.servers import reserve_port
from tests.certificates import Certificates
from tests.conftest import needs
from tests.managers import manager_over, patient_manager
from tests.server.locking.test_database import acquire, between
from tests.zookeeper import Zoo

from .test_replicated import clean

if find_spec("kazoo"):
    from django_redlock.contrib.consensus.zookeeper import client
    from django_redlock.contrib.consensus.zookeeper import node as tables
    from django_redlock.contrib.consensus.zookeeper.client import ZnodeChange, ZookeeperClient
    from django_redlock.contrib.consensus.zookeeper.node import ZookeeperNode
else:
    pytestmark = pytest.mark.skip("needs kazoo: pip install django-redlock[zookeeper]")


def node(url: str, prefix: str = "t:", **options: Any) -> "ZookeeperNode":
    found = open_node(NodeSpec(url, options=options), prefix)
    assert isinstance(found, ZookeeperNode)
    return found


@pytest.fixture
def store(zookeeper: Zoo) -> Zoo:
    """A server of this kind only."""
    return zookeeper


def test_refusal_is_confirmed_by_a_write(table: Any, other: Any, monkeypatch: pytest.MonkeyPatch):
    """A deposed leader still answers reads, so a refusal counts only in the era in which it was decided."""
    other.execute([acquire(secret="b" * 32)])

    def change_eras() -> None:
        other.execute([Release(("{x}",), "b" * 32)])
        other.connection.write([ZnodeChange("/t:/era", tables.dump(other._era.dump()), -1)])

    between(table, monkeypatch, change_eras)

    assert table.execute([acquire()])[0].kind in POSITIVE


def test_folder_with_more_records_than_a_listing_takes(table: Any, other: Any, monkeypatch: pytest.MonkeyPatch):
    """A listing says so and costs no connection, and locks work; a full folder that can be listed is listed alone."""
    monkeypatch.setattr(replicated, "CLEANING", -100.0)
    candidates = (f"n{number}" for number in count())
    names = list(islice((name for name in candidates if "/h00/" in table.key("h", f"{{{name}}}")), 8))
    assert {reply.kind for reply in table.execute([acquire(name) for name in names])} == {Kind.ACCEPTED}
    assert other.execute([acquire("ended", ttl=0.01, keep=0.01)])[0].kind is Kind.ACCEPTED
    connection = table.connection

    with monkeypatch.context() as patch:
        patch.setattr(tables, "MOST_NAMES", 7)
        (refused,) = table.execute([Survey(size=100)])
        clean(table)
        (busy,) = table.execute([acquire(names[0], "b" * 32)])
    monkeypatch.setattr(tables, "NAMES_AT_ONCE", 3)
    (listed,) = table.execute([Survey(size=100)])
    clean(table)

    assert (refused.failure, busy.kind) == (Failure.TOO_MANY, Kind.BUSY)
    assert table.connection is connection
    assert sorted(row.slug for row in listed.rows) == sorted(f"{{{name}}}" for name in names)
    assert (listed.total, listed.cursor) == (9, "")
    assert table.execute([Survey(size=100)])[0].total == 8


def test_stale_write_after_delete_and_create_fails(table: Any, other: Any, monkeypatch: pytest.MonkeyPatch):
    """Versions begin anew when a record is created again; a write that has read before must not succeed."""
    monkeypatch.setattr(replicated, "CLEANING", -100.0)
    other.execute([acquire(ttl=0.01, keep=0.01)])

    def delete_and_create() -> None:
        clean(other)
        assert other.connection.get([other.key("h", "{x}")]) == [None]
        other.execute([acquire(secret="b" * 32)])

    between(table, monkeypatch, delete_and_create)

    assert table.execute([acquire()])[0].kind is Kind.BUSY


# The clock of the leader


@pytest.mark.parametrize("said", [0, -1, 2**62])
def test_time_that_cannot_be_one_is_not_believed(table: Any, monkeypatch: pytest.MonkeyPatch, said: int):
    """No number that comes from a node is taken on trust."""
    numbers = client.numbers
    monkeypatch.setattr(client, "numbers", lambda stat: (*numbers(stat)[:2], said, 0))
    monkeypatch.setattr(table, "now", count(step=10.0).__next__)  # no time for another attempt
    (reply,) = table.execute([acquire()])

    assert (reply.kind, reply.failure) == (Kind.FAILED, Failure.MALFORMED)


def test_vote_counts_only_in_the_era_in_which_it_was_decided(table: Any, other: Any, monkeypatch: pytest.MonkeyPatch):
    """If the leader has changed before the write, its outcome is unknown; the next request begins an era."""
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
    table: Any, other: Any, monkeypatch: pytest.MonkeyPatch
):
    """The hold was written to end by the clock before the jump, so for others it may have ended already."""
    numbers = client.numbers
    table.execute([acquire("y")])
    monkeypatch.setattr(
        client, "numbers", lambda stat: (*numbers(stat)[:2], numbers(stat)[2] + 70_000, numbers(stat)[3])
    )
    (reply,) = table.execute([acquire()])
    (taken,) = other.execute([acquire(secret="b" * 32)])

    assert reply.kind is Kind.UNKNOWN
    assert taken.kind in POSITIVE


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
    with closing(manager_over([found], node_timeout=10.0, ttl=60.0)) as manager:
        assert manager.lock("a", wait=0).acquire().release() == "released"
        assert found.inspect(30.0).facts["version"]
    for wrong, failures in (
        (files, (Failure.NO_CLIENT_CERTIFICATE, Failure.RESET, Failure.NO_LEADER, Failure.TLS_FAILED)),
        ({}, (Failure.CERTIFICATE_REFUSED,)),
    ):
        with pytest.raises(LinkError) as refused:
            node(url, **wrong).connect(30.0)
        assert refused.value.failure in failures


def test_member_that_accepts_and_is_silent_is_left_at_once(monkeypatch: pytest.MonkeyPatch):
    """A frozen member still accepts connections; kazoo would wait for the length of a session."""
    monkeypatch.setattr("django_redlock.contrib.consensus.zookeeper.client.SESSION", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = ZookeeperClient(node(f"zookeeper://127.0.0.1:{silent.getsockname()[1]}").place, 0, 0.2)
        with pytest.raises(TimeoutError):
            client.open()
        began = time.monotonic()
        client.close()

    assert time.monotonic() - began < 30
