"""An etcd cluster as a node: its decisions, its clock, its notifications, its users and its certificates."""

import shutil
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
from django.test import override_settings

from django_redlock import QuorumUnavailableError, lock, locks
from django_redlock.contrib.consensus import replicated
from django_redlock.contrib.consensus.etcd.client import DENIED, EtcdError, Header, encoded
from django_redlock.contrib.consensus.etcd.node import LARGEST_WRITE, EtcdNode, EtcdTable, records_of
from django_redlock.core.protocol import Failure, Kind, Release, Survey
from django_redlock.inventory.doctor import diagnose
from django_redlock.inventory.node_checks import Level
from django_redlock.nodes import NodeSpec
from django_redlock.nodes.backends import open_node
from django_redlock.nodes.base import LinkError
from django_redlock.nodes.records.record import Decision, Names, load
from django_redlock.nodes.records.table import UntouchedError
from django_redlock.runtime.clock import steady
from tests.certificates import Certificates
from tests.etcd import Member
from tests.managers import manager_over, patient_manager
from tests.server.locking.test_database import SECRET, acquire
from tests.waiting import wait_until

from .test_replicated import clean


def node(url: str, **options: Any) -> EtcdNode:
    found = open_node(NodeSpec(url, options=options), "t:")
    assert isinstance(found, EtcdNode)
    return found


@pytest.fixture
def store(etcd: Member) -> Member:
    """A server of this kind only."""
    return etcd


@pytest.mark.parametrize(("prefix", "root"), [("t:staging:", "t:staging:"), ("t:x/y:", "t:x%2Fy:")])
def test_records_of_another_alias_are_left_alone(
    etcd: Member, table: EtcdTable, monkeypatch: pytest.MonkeyPatch, prefix: str, root: str
):
    """One KEY_PREFIX may begin with another one; each alias has a clock of its own."""
    monkeypatch.setattr(replicated, "CLEANING", -100.0)  # so that every record seems to be over
    with closing(open_node(NodeSpec(etcd.url), prefix).table(30.0)) as staging:
        staging.open()
        staging.execute([acquire(ttl=60.0, keep=60.0)])
        clean(table)

        assert staging.execute([acquire(secret="b" * 32)])[0].kind is Kind.BUSY
        every = {"key": encoded(root), "range_end": encoded(f"{root}~")}
        found = records_of(staging.call("/v3/kv/range", every))
        assert sorted(found) == [f"{root}clock", f"{root}h/{{x}}", f"{root}id"]
        assert not table.execute([Survey(size=10)])[0].rows


def test_many_useless_records_are_deleted_in_few_requests(table: EtcdTable, monkeypatch: pytest.MonkeyPatch):
    """The requests of the process wait while it cleans up, so that takes a handful of round trips."""
    table.execute([acquire(f"n{number:03}", f"{number:032}", ttl=0.01, keep=0.01) for number in range(150)])
    monkeypatch.setattr(replicated, "CLEANING", -100.0)
    call, calls = table.call, list[str]()
    monkeypatch.setattr(table, "call", lambda path, body: calls.append(path) or call(path, body))
    table._clean_at = 0.0
    table.clean()

    assert len(calls) <= 4
    assert table._clean_at <= table.now() + 1.0  # the rest follows soon
    assert len(table.page("", of_names=True)[0]) == 150 - LARGEST_WRITE


def let_age(table: EtcdTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a table find that the era has lasted for hours."""
    read = table.read

    def later(keys: Any) -> Any:
        moment, found = read(keys)
        return moment._replace(low=moment.low + 10_000, high=moment.high + 10_000), found

    monkeypatch.setattr(table, "read", later)


def test_record_of_a_later_era_is_not_deleted(
    table: EtcdTable, other: EtcdTable, etcd: Member, monkeypatch: pytest.MonkeyPatch
):
    """A process that cleans up may be paused while the era changes; the holds of the new era must stay."""
    table.execute([acquire("other")])
    lease = load(Names(set(), set()), table.key, table.read).moment.era.split("/")[0].rpartition(".")[2]
    let_age(table, monkeypatch)
    page = table.page

    def paused(after: str, *, of_names: bool) -> Any:
        etcd.ask("lease/revoke", {"ID": lease})
        other.looked = -100.0
        assert other.execute([acquire()])[0].kind is Kind.ACCEPTED
        return page(after, of_names=of_names)

    monkeypatch.setattr(table, "page", paused)
    table._clean_at = 0.0
    table.clean()

    assert other.execute([acquire(secret="b" * 32)])[0].kind is Kind.BUSY


def test_record_of_a_release_is_kept_for_a_while(table: EtcdTable, other: EtcdTable, monkeypatch: pytest.MonkeyPatch):
    """A grant in flight finds that it was released, although nothing else is known of the name."""
    let_age(other, monkeypatch)
    write = table.write

    def late(decision: Decision) -> bool | None:
        monkeypatch.setattr(table, "write", write)
        other.execute([Release(("{x}",), SECRET, 60.0)])
        other._clean_at = 0.0
        other.clean()
        return write(decision)

    monkeypatch.setattr(table, "write", late)

    assert table.execute([acquire()])[0].kind is not Kind.ACCEPTED
    assert not table.execute([Survey(("{x}",))])[0].rows[0].value


def test_doctor_reports_an_alarm(etcd: Member):
    """A cluster without space takes no locks, and the error says so."""
    options = {"ttl": 30.0, "node_timeout": 1.0}
    with override_settings(REDLOCK={"default": {"NODES": etcd.url, "OPTIONS": options}}):
        lock("a", wait=30).acquire().release()
        etcd.ask("maintenance/alarm", {"action": "ACTIVATE", "alarm": "NOSPACE"})
        full = diagnose(timeout=30.0)
        with pytest.raises(QuorumUnavailableError, match="is out of space"):
            lock("a", wait=30).acquire()
        (alarm,) = etcd.ask("maintenance/alarm", {"action": "GET"})["alarms"]
        etcd.ask("maintenance/alarm", {"action": "DEACTIVATE", **alarm})
        locks.reset()

    assert [finding.id for finding in full.findings if finding.level is Level.ERROR] == ["etcd-alarm"]
    assert full.nodes[0].facts["alarms"] == "NOSPACE"


def test_doctor_notices_members_of_different_clusters(etcd: Member):
    """A URL that names members of two clusters gives each lock two holders."""
    with Member() as stranger:
        strange = stranger.url.removeprefix("etcd://")
        options = {"ttl": 30.0, "node_timeout": 1.0}
        with override_settings(REDLOCK={"default": {"NODES": f"{etcd.url},{strange}", "OPTIONS": options}}):
            found = diagnose(timeout=30.0)
            locks.reset()

    assert [finding.id for finding in found.findings if finding.level is Level.ERROR] == ["etcd-alone"]
    assert found.nodes[0].facts["alone"] == strange


# The clock of the leader


def test_lock_survives_a_new_clock_and_ends_all_the_same(table: EtcdTable, other: EtcdTable, etcd: Member):
    """If the lease that serves as a clock is gone, a new era begins; a hold has its whole ttl once more."""
    table.execute([acquire(ttl=2.0)])
    lease = load(Names({"{x}"}, set()), table.key, table.read).moment.era.split("/")[0].rpartition(".")[2]
    etcd.ask("lease/revoke", {"ID": lease})
    table.looked = other.looked = -100.0

    assert other.execute([acquire(secret="b" * 32)])[0].kind is Kind.BUSY
    wait_until(lambda: other.execute([acquire(secret="b" * 32)])[0].kind is not Kind.BUSY)

    assert table.execute([Survey(("{x}",))])[0].rows[0].value.startswith("b" * 32)


def test_data_lost_behind_a_connection_that_a_member_ended_is_noticed(table: EtcdTable, etcd: Member):
    """A member that stops may announce the end of the connection in its last reply; the next one is greeted."""
    table.execute([acquire(ttl=60.0)])
    table.connection._http.close()  # as http.client does after such a reply; it would connect again by itself
    etcd.wipe()
    etcd.start()

    with pytest.raises(UntouchedError) as lost:
        table.execute([acquire(secret="b" * 32)])
    assert lost.value.failure is Failure.RESTARTED


def hurry(table: EtcdTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each pause of a table take a second on its clock, and none in truth."""
    pauses: list[object] = []
    monkeypatch.setattr(table, "pause", lambda *longest: pauses.append(longest))
    monkeypatch.setattr(table, "now", lambda: steady() + len(pauses))


def test_leader_that_does_not_count_yet_is_asked_rarely(table: EtcdTable, monkeypatch: pytest.MonkeyPatch):
    """For its election timeout, a new leader gives more than was granted, and all processes wait for it."""
    call, readings = table.call, []

    def new(path: str, body: Any) -> Any:
        reply = call(path, body)
        if not path.endswith("timetolive"):
            return reply
        readings.append(reply)
        return reply | {"TTL": "5000000001"}

    monkeypatch.setattr(table, "call", new)
    table.patience = 1.0
    (reply,) = table.execute([acquire()])

    assert reply.failure is Failure.NO_LEADER
    assert len(readings) < 60


def test_lease_is_revoked_unless_the_record_may_name_it(
    table: EtcdTable, etcd: Member, monkeypatch: pytest.MonkeyPatch
):
    """An attempt that is refused leaves no lease behind, which would never end."""

    def leases() -> int:
        return len(etcd.ask("lease/leases", {}).get("leases", []))

    def denied(versions: Any, values: Any) -> Header:
        raise EtcdError(Failure.NOPERM, DENIED)

    before = leases()
    with monkeypatch.context() as patch:
        patch.setattr(table, "_txn", denied)
        (reply,) = table.execute([acquire()])

    assert (reply.failure, leases()) == (Failure.NOPERM, before)
    assert table.execute([acquire()])[0].kind is Kind.ACCEPTED
    assert leases() == before + 1


def test_reading_of_another_term_is_not_believed(table: EtcdTable, monkeypatch: pytest.MonkeyPatch):
    """A reading counts only if the member has known the same term before and after it."""
    call = table.call

    def elected(path: str, body: Any) -> Any:
        reply = call(path, body)
        other = {"header": reply["header"] | {"raft_term": "99"}}
        return reply | other if path.endswith("timetolive") else reply

    monkeypatch.setattr(table, "call", elected)
    hurry(table, monkeypatch)

    assert table.execute([acquire()])[0].failure is Failure.NO_LEADER


# Users and certificates


@pytest.fixture(params=["simple", "jwt"])
def guarded(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[Member]:
    """An etcd that wants a user; ``app`` may use the prefix ``t:`` and nothing else."""
    public, private = certificates["tokens.pub"], certificates["server.key"]
    run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    tokens = f"jwt,pub-key={public},priv-key={private},sign-method=ES256" if request.param == "jwt" else request.param
    with Member(options=("--auth-token", tokens)) as member:
        ends = {"key": b64encode(b"t:").decode(), "range_end": b64encode(b"t;").decode()}
        member.ask("auth/role/add", {"name": "locks"})
        member.ask("auth/role/grant", {"name": "locks", "perm": {"permType": "READWRITE", **ends}})
        for user, role in (("root", "root"), ("app", "locks")):
            with suppress(OSError):
                member.ask("auth/role/add", {"name": role})
            member.ask("auth/user/add", {"name": user, "password": "p@ss"})
            member.ask("auth/user/grant", {"user": user, "role": role})
        member.ask("auth/enable", {})
        member.ping = lambda: None  # type: ignore[method-assign]
        yield member


def test_user_with_rights_on_the_prefix_is_enough(guarded: Member):
    """A missing right is named, and never a password; a token that was lost is asked for again."""
    host = guarded.url.removeprefix("etcd://")
    with closing(patient_manager([f"etcd://app:p%40ss@{host}"])) as manager:
        lease = manager.lock("a", wait=0).acquire()
        with closing(node(f"etcd://{host}", username="app", password="p@ss").listen("p", 30.0, print)) as link:
            assert link.read() == []
        guarded.stop()  # tokens are kept in memory
        guarded.start()
        wait_until(lease.extend)
        assert lease.release() == "released"
    for url, failure in (
        (f"etcd://{host}", Failure.NOAUTH),
        (f"etcd://app:wrong@{host}", Failure.WRONGPASS),
    ):
        with pytest.raises(LinkError) as refused:
            node(url).connect(30.0)
        assert refused.value.failure is failure
    with pytest.raises(LinkError) as denied:
        open_node(NodeSpec(f"etcd://app:p%40ss@{host}"), "u:").connect(30.0)
    assert denied.value.failure is Failure.NOPERM


def test_user_stays_logged_in_when_users_change(guarded: Member):
    """A signed token is valid until the next change of any user; then the node asks for another one."""
    host = guarded.url.removeprefix("etcd://")
    with closing(patient_manager([f"etcd://app:p%40ss@{host}"])) as manager:
        lease = manager.lock("a", wait=0).acquire()
        token = guarded.ask("auth/authenticate", {"name": "root", "password": "p@ss"})["token"]
        guarded.ask("auth/user/add", {"name": "other", "password": "x"}, token=token)

        assert lease.extend()
        assert lease.release() == "released"


def test_password_that_etcd_does_not_want_is_reported(etcd: Member):
    """A cluster without users refuses to authenticate one."""
    with pytest.raises(LinkError) as refused:
        node(etcd.url, username="app", password="x").connect(30.0)

    assert refused.value.failure is Failure.NO_PASSWORD


def test_client_certificate(certificates: Certificates):
    """Etcds:// verifies the members and shows a certificate; without one, or with a wrong authority, it fails."""
    files = {"ssl_ca_certs": certificates["ca.crt"]}
    ours = {**files, "ssl_certfile": certificates["client.crt"], "ssl_keyfile": certificates["client.key"]}
    options = ("--client-cert-auth", "--trusted-ca-file", certificates["ca.crt"])
    served = ("--cert-file", certificates["server.crt"], "--key-file", certificates["server.key"])
    with Member(options=(*options, *served), certificates=ours) as member:
        url = member.url.replace("etcd://", "etcds://")
        with closing(manager_over([node(url, **ours)], node_timeout=10.0, ttl=60.0)) as manager:
            assert manager.lock("a", wait=0).acquire().release() == "released"
        for wrong in (files, {}):
            with pytest.raises(LinkError) as refused:
                node(url, **wrong).connect(30.0)
            assert refused.value.failure in (Failure.NO_CLIENT_CERTIFICATE, Failure.CERTIFICATE_REFUSED, Failure.RESET)


def test_renewed_certificate_is_read(certificates: Certificates, tmp_path: Path):
    """A process that runs for longer than its certificate presents the one that has replaced it in the file."""
    options = ("--client-cert-auth", "--trusted-ca-file", certificates["ca.crt"])
    served = ("--cert-file", certificates["server.crt"], "--key-file", certificates["server.key"])
    ours = {"ssl_ca_certs": certificates["ca.crt"], "ssl_keyfile": str(tmp_path / "app.key")}
    ours["ssl_certfile"] = str(tmp_path / "app.crt")

    def renew(name: str) -> None:
        shutil.copy(certificates[f"{name}.crt"], ours["ssl_certfile"])
        shutil.copy(certificates[f"{name}.key"], ours["ssl_keyfile"])

    renew("client")
    with Member(options=(*options, *served), certificates=ours) as member:
        same = node(member.url.replace("etcd://", "etcds://"), **ours)
        renew("expired")
        with pytest.raises(LinkError):
            same.connect(30.0)
        renew("client")
        same.connect(30.0).close()


def test_encrypted_key_needs_its_password(certificates: Certificates):
    """Without it, the error says so, and no process waits until somebody enters it at the terminal."""
    files = {"ssl_certfile": certificates["client.crt"], "ssl_keyfile": certificates["locked.key"]}
    encrypted = ("-aes128", "-passout", "pass:right", "-out", files["ssl_keyfile"])
    run(["openssl", "ec", "-in", certificates["client.key"], *encrypted], check=True, capture_output=True)

    for password in ({}, {"ssl_password": "wrong"}):
        with pytest.raises(LinkError, match="TLS refuses a file of its ssl_ options") as refused:
            node("etcds://127.0.0.1:1", **files, **password).connect(30.0)
        assert refused.value.failure.lasting
    with pytest.raises(LinkError, match=r"unreachable|refused"):
        node("etcds://127.0.0.1:1", **files, ssl_password="right").connect(30.0)
