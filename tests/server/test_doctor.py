"""Each finding of the doctor, produced on real servers by breaking one thing; and the command's output."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from django.test import override_settings
from redis.credentials import CredentialProvider

from django_redlock import LockTakenError, lock
from django_redlock.checks import check_deployment
from django_redlock.testing import FaultProxy, Server, Servers, start_servers
from django_redlock.testing.servers import reserve_port
from tests.clusters import PASSWORD, cluster, cluster_nodes
from tests.conftest import needs
from tests.held import run
from tests.lab.chaos.clock import Clock, build, compiler
from tests.server.locking.test_replies import babbler
from tests.service.locking.test_sentinel import watched
from tests.services import django_database
from tests.waiting import wait_until

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "operate" / "security.md").read_text()
(LINE,) = re.findall(r"```text\n(ACL SETUSER .*?)```", PAGE, re.DOTALL)
ACL = LINE.replace("myproject:", "redlock:").replace("PASSWORD", "secret").split()
RIGHTS = [rule for rule in ACL if rule.startswith(("+", "~", "&"))]
OPEN = {"restart_guard": False, "node_timeout": 1.0}


def found(urls: list[Any], options: Mapping[str, Any] = OPEN, timeout: float = 30.0) -> list[SimpleNamespace]:
    with override_settings(REDLOCK={"default": {"NODES": urls, "OPTIONS": {**options}}}):
        out = run("redlock_doctor", "--format=json", "--fail-level=never", f"--timeout={timeout}")[0]
    (alias,) = json.loads(out)["aliases"]
    return [SimpleNamespace(**finding) for finding in alias["findings"]]


def ids(findings: list[SimpleNamespace]) -> dict[str, str]:
    """Return the names of findings and their levels, without those of servers that store nothing."""
    return {finding.id: finding.level for finding in findings if finding.id != "forgets"}


def only(findings: list[SimpleNamespace], name: str) -> SimpleNamespace:
    (one,) = [finding for finding in findings if finding.id == name]
    return one


@pytest.fixture
def three(nodes: Servers) -> list[str]:
    return nodes.urls[:3]


def test_unreachable(nodes, three):
    """A node that is dead or silent is reported with the reason; a quorum that is missing is the worst finding."""
    for break_it, detail in (("freeze", "timeout"), ("kill", "refused")):
        getattr(nodes[0], break_it)()

        findings = found(three, timeout=3.0)

        assert ids(findings) == {"unreachable": "warning"}
        assert f"({detail})" in findings[0].text
    nodes[1].kill()
    worst = found(three, timeout=3.0)[0]
    assert (worst.id, worst.level) == ("no-quorum", "error")
    assert "1 of 3 nodes can be reached, and 2 are needed" in worst.text


def reason(node: Any, three: list[str]) -> str:
    finding = only(found([node, *three[1:]], timeout=3.0), "unreachable")
    (given,) = re.findall(r"\((.*)\): it gives no vote", finding.text)
    return str(given)


def test_reason_why_a_server_cannot_be_reached(three):
    """The reason is that of a lock, which tests/server/locking/test_transport.py shows, and no password is."""
    password = three[0].replace("//", "//:sesame@")
    assert reason(password, three).startswith("has no password")
    assert "sesame" not in str(found([password, *three[1:]]))
    with _server_with_user(without="+select") as url:  # the only command of a new connection that needs a right
        assert reason(url, three).startswith("NOPERM")
    with babbler(b"-LOADING Redis is loading the dataset in memory\r\n", b"") as busy:
        assert reason(busy.url, three).startswith("LOADING")
    with Server() as dead, FaultProxy(dead.url) as proxy:  # as HAProxy, it accepts connections all the same
        dead.kill()
        assert reason(proxy.url, three) in ("closed", "reset")
    assert "mode" not in ids(found(["redis+cluster://127.0.0.1:1", *three[1:]]))  # which nobody knows


class Away(CredentialProvider):
    def get_credentials(self) -> tuple[str, str]:
        raise RuntimeError("the token service is away")


@pytest.mark.parametrize(
    ("scheme", "options", "detail"),
    [
        ("redis", {"credential_provider": Away()}, "unreachable"),
        ("rediss", {"ssl_ciphers": "none-such"}, "TLS failed"),
    ],
)
def test_node_whose_options_raise_an_error_of_their_own(three, scheme, options, detail):
    """It cannot be reached, whatever the connection raises; the doctor and the checks report the other nodes."""
    node = {"URL": three[0].replace("redis", scheme), "OPTIONS": options}

    assert reason(node, three) == detail
    with override_settings(REDLOCK={"default": {"NODES": [node, *three[1:]]}}):
        assert "redlock.W104" not in {message.id for message in check_deployment()}


def test_databases_that_are_no_nodes(three, tmp_path, django_db_blocker):
    """A database that no other process would find, and a damaged file."""
    file = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    with django_db_blocker.unblock(), django_database("fleeting", file):
        assert reason("database://fleeting", three).startswith("is in memory, where no other process finds a lock")
    (tmp_path / "damaged.sqlite3").write_bytes(b"x" * 10_000)
    file["NAME"] = str(tmp_path / "damaged.sqlite3")
    with django_db_blocker.unblock(), django_database("damaged", file):
        assert reason("database://damaged", three).startswith("cannot use its disk")


def test_replica(nodes, three):
    """A replica is an error, also for the trial lock; its master has replicas."""
    with nodes[1].client() as client:
        client.config_set("repl-diskless-sync-delay", 0)  # seconds that it waits for more replicas
    with Server() as replica:
        with replica.client() as client:
            client.replicaof("127.0.0.1", nodes[1].port)
            wait_until(lambda: client.info("replication")["master_link_status"] == "up")
        findings = found([replica.url, *three[1:]])
        guarded = found([replica.url, *three[1:]], {"node_timeout": 1.0})

    assert ids(findings) == {"replica": "error", "has-replicas": "note"}  # and no trial, which fails for that reason
    assert {finding.id for finding in guarded if finding.node == findings[0].node} == {"replica"}
    assert "REPLICAOF NO ONE" in only(findings, "replica").remedy


def test_servers_that_are_no_nodes_of_their_own(nodes, three):
    """A server in cluster mode is an error, and so is one server under two addresses, found by its run id."""
    with cluster_nodes(1) as (member,):
        findings = found([member.url, three[0].replace("127.0.0.1", "localhost"), *three])

    assert only(findings, "mode").level == "error"
    assert only(findings, "duplicate").level == "error"
    assert only(findings, "duplicate").node == f"127.0.0.1:{nodes[0].port}"


def test_eviction(three):
    """A node that may evict keys is an error, or a warning where that is allowed; past evictions are another one."""
    with Server(args=("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")) as small:
        before = found([small.url, *three[1:]])
        allowed = found([small.url, *three[1:]], {**OPEN, "allow_evicting": [f"127.0.0.1:{small.port}"]})
        with small.client() as client:
            for number in range(300):
                client.set(f"filler:{number}", "x" * 20_000)
        after = found([small.url, *three[1:]])

    assert ids(before)["evicts"] == "error"
    assert only(allowed, "evicts").level == "warning"
    assert ids(after)["evicted"] == "warning"


def test_full_memory(three):
    """Memory that is nearly full, and what follows from it, are reported; a full server still records its age."""
    with Server(args=("--maxmemory", "3mb")) as small:
        with small.client() as client, suppress(redis.OutOfMemoryError):
            for number in range(1000):
                client.set(f"filler:{number}", "x" * 10_000)
        findings = found([small.url, *three[1:]])

    level = ids(findings)["memory-full"]
    assert only(findings, "memory-full").text.endswith("refuses to take locks (OOM).")
    assert ids(findings) == {"memory-full": level} | ({"trial": "error"} if level == "warning" else {})

    with Server(args=("--maxmemory", "1")) as full:
        assert {"memory-full", "restarted"} <= ids(found([full.url, *three[1:]], {"node_timeout": 1.0})).keys()


def test_persistence(three):
    """A node that is declared durable and is not, one that forgets without a guard, and one that cannot save."""
    name = three[0].removeprefix("redis://").removesuffix("/0")

    assert only(found(three, {**OPEN, "durable": [name]}), "not-durable").level == "error"
    assert [finding.level for finding in found(three) if finding.id == "forgets"] == ["warning"] * 3
    with Server() as server:
        with server.client() as client:
            (folder,) = client.config_get("dir").values()
            shutil.rmtree(folder)
            with suppress(redis.ResponseError):  # some versions notice at once
                client.bgsave()
            wait_until(lambda: not client.info("persistence")["rdb_bgsave_in_progress"])
        assert ids(found([server.url, *three[1:]]))["cannot-save"] == "warning"


def test_restarted(three):
    """A node that has just started gives no vote yet, and the finding has the remaining time."""
    with Server() as fresh:
        findings = found([fresh.url, *three[1:]], {"node_timeout": 1.0, "durable": []})

    about = [finding for finding in findings if finding.id == "restarted" and finding.node.endswith(str(fresh.port))]
    assert [finding.level for finding in about] == ["warning"]
    assert re.search(r"no vote for (5\d|6\d) s", about[0].text)


def test_token_that_no_node_can_have_accepted(nodes, three):
    """The token of a lock that is held is found."""
    with nodes[0].client() as client:
        client.set("redlock:{orders:7}:f", 2**63 - 1)
        client.set("redlock:{orders:7}:h", "theirs", ex=60)
        client.zadd("redlock:index", {"{orders:7}": "inf"})
    findings = found(three)

    assert only(findings, "absurd-token").level == "error"
    assert "'orders:7'" in only(findings, "absurd-token").text


@contextmanager
def _server_with_user(without: str = "") -> Iterator[str]:
    with Server() as server, server.client() as client:
        client.execute_command(*(rule for rule in ACL if rule != without))
        yield f"redis://locks:secret@127.0.0.1:{server.port}/1"


def test_a_cluster_with_a_member_that_is_down(nodes):
    """The shard that decides is examined; a named member that is down is a finding of its own, and no alarm."""
    nowhere = reserve_port(nodes)
    with cluster(2) as running:
        port = running.servers[0].port
        findings = found([f"redis+cluster://:{PASSWORD}@127.0.0.1:{nowhere},127.0.0.1:{port}"])

    assert {"member", "mode", "unreachable", "trial"} & set(ids(findings)) == {"member"}
    assert only(findings, "member").level == "warning"
    assert f"127.0.0.1:{nowhere} (refused)" in only(findings, "member").text


def test_a_sentinel_that_is_down(three, tmp_path):
    """A sentinel that is down is a finding and no alarm; without any of them the service cannot be reached."""
    with watched(tmp_path) as sentinel:
        nowhere = f"redis://127.0.0.1:{reserve_port(sentinel)}"
        node = {"SENTINELS": [nowhere, f"redis://127.0.0.1:{sentinel.port}"], "SERVICE_NAME": "mymaster"}
        findings = found([node])
        assert reason({**node, "SENTINELS": [nowhere]}, three).startswith("sentinel")

    assert not {"unreachable", "no-quorum", "trial"} & ids(findings).keys()
    assert only(findings, "sentinel").level == "warning"
    assert f"{nowhere.removeprefix('redis://')} (refused)" in only(findings, "sentinel").text


def test_the_doctor_leaves_nothing_behind(nodes, three):
    """The doctor's trial keys are gone at its end, except the fencing token, which stays for a minute."""
    found(three)

    with nodes[0].client() as client:
        keys = [key for key in client.keys("*") if not key.endswith(":served")]
        assert [key for key in keys if client.pttl(key) < 0] == []
        assert [key for key in keys if not key.endswith((":f", ":line", ":number"))] == []


def test_rights(three):
    """The documented rights are enough, also for the doctor; INFO is needed only while restarts are guarded."""
    with _server_with_user() as url:
        assert not {"right", "trial", "unreachable"} & ids(found([url])).keys()
    with _server_with_user(without="+info") as url:
        guarded = found([url, *three[1:]], {"node_timeout": 1.0})
        unguarded = found([url])
    with _server_with_user(without="+set") as url:
        silent = found([url, *three[1:]], {"node_timeout": 1.0})

    assert only(silent, "no-age").level == "warning"
    assert only(guarded, "no-info").level == "error"
    assert "right" not in ids(guarded)
    assert not {"no-info", "right", "trial"} & ids(unguarded).keys()


def test_clocks(three, tmp_path):
    """A node whose clock is far from the others' is found, with the difference; so is this machine's own clock."""
    needs("a C compiler", compiler(), "apt-get install gcc libc6-dev")
    clock = Clock(build(tmp_path), tmp_path / "clock")
    clock.set(5.0)
    with Server(environment=clock.environment) as fast:
        findings = found([fast.url, *three[1:]])
    assert ids(findings) == {"clock": "error"}
    assert re.search(r"is (4\.9|5\.\d) s ahead of the others'", findings[0].text)

    clock.set(-7.0)
    with start_servers(3, environment=clock.environment) as slow:
        findings = found(slow.urls)
    assert ids(findings) == {"own-clock": "warning"}
    assert "7.0 s ahead of the nodes'" in only(findings, "own-clock").text


def test_trial(nodes, three):
    """A trial finds a node on which a lock cannot be taken, although all else is fine."""
    assert "trial" not in ids(found(three, {"restart_guard": False}, timeout=600.0))
    findings = found([f"{three[0]}?retry_on_timeout=true&socket_timeout=9&protocol=3&max_connections=9", *three[1:]])
    assert ids(findings) == {"ignored-options": "note"}
    assert "max_connections, protocol, retry_on_timeout, socket_timeout" in only(findings, "ignored-options").text

    with nodes[0].client() as client:
        client.set("redlock:index", "not an index")
    findings = found(three)

    assert ids(findings) == {"trial": "error"}
    assert "WRONGTYPE" in findings[0].text


def test_stale_keys(nodes, three):
    """A key that keeps a lock from everybody is found, although a lock of the doctor's own can be taken."""
    with override_settings(REDLOCK={"default": {"NODES": three, "OPTIONS": OPEN}}):
        for server in nodes[:3]:
            with server.client() as client:
                client.set("redlock:{orders:7}:h", "locked by another program")
        with pytest.raises(LockTakenError):
            lock("orders:7", wait=0).acquire()

    finding = only(found(three), "stale-key")

    assert "'orders:7'" in finding.text
    assert "redlock_clear" in finding.remedy
    for server in nodes[:3]:
        with server.client() as client:
            client.delete("redlock:{orders:7}:h")
    assert ids(found(three)) == {}


def test_key_of_another_type(nodes, three):
    """A key of a lock that another program wrote as a list is found on the one node that has it, with its deletion."""
    with nodes[0].client() as client, override_settings(REDLOCK={"default": {"NODES": three, "OPTIONS": OPEN}}):
        client.rpush("redlock:{orders:7}:h", "x")
        lease = lock("orders:7", wait=0).acquire()

    findings = found(three)

    assert ids(findings) == {"wrong-type": "error"}
    assert only(findings, "wrong-type").node.endswith(str(nodes[0].port))
    assert "DEL redlock:{orders:7}:h" in only(findings, "wrong-type").remedy
    lease.release()


def test_key_of_another_type_in_a_cluster():
    """Every command that says how to delete such a key names it as the cluster has it."""
    key = "{shop}:{orders:7}:h"
    with cluster(1) as it, redis.Redis.from_url(it.servers[0].url, password=PASSWORD) as client:
        settings = {"default": {"NODES": [it.url], "KEY_PREFIX": "shop", "OPTIONS": OPEN}}
        client.rpush(key, "x")
        client.zadd("{shop}:index", {"{orders:7}": "inf"})
        with override_settings(REDLOCK=settings):
            cleared = run("redlock_clear", "--no-input")[1]
            released = run("redlock_release", "orders:7", "--no-input")[0]

    assert [told.partition("Delete it there: ")[2].split("\n")[0] for told in (cleared, released)] == [f"DEL {key}"] * 2


# The command


def test_command_when_all_is_well():
    """With three servers that store their data, the command reports no fault for each alias and exits with 0."""
    with start_servers(3, args=("--appendonly", "yes", "--appendfsync", "always")) as durable:
        with override_settings(REDLOCK={"default": {"NODES": durable.urls, "OPTIONS": OPEN}}):
            out, error, code = run("redlock_doctor")

    assert "default: 3 nodes" in out
    assert out.count("master, up ") == 3
    assert "All is well: a lock was taken, extended and released on each node." in out
    assert (error, code) == ("", 0)


def test_command_with_findings(three):
    """Errors make the command exit with 2; warnings alone do not make it fail, and exit with 1 if that is asked for."""
    warning = {"default": {"NODES": three, "OPTIONS": OPEN}}
    error = {"default": {"NODES": [*three, three[0].replace("127.0.0.1", "localhost")], "OPTIONS": OPEN}}
    levels: list[list[str]] = [[], ["--fail-level=warning"], ["--fail-level=error"], ["--fail-level=never"]]
    with override_settings(REDLOCK=warning):
        codes = [run("redlock_doctor", *args)[2] for args in levels]
    with override_settings(REDLOCK=error):
        codes += [run("redlock_doctor", *args)[2] for args in levels]
        out, ending, _ = run("redlock_doctor")

    assert codes == [0, 1, 0, 0, 2, 2, 2, 0]
    counts = [len(re.findall(f"^{level} ", out, re.MULTILINE)) for level in ("ERROR", "WARNING")]
    assert counts[0] == 1
    assert re.fullmatch(rf"Not all is well: 1 error, {counts[1]} warnings?\.", ending)
    assert re.search(r"^ERROR duplicate  localhost:\d+: It is the same server as", out, re.MULTILINE)
    assert "Remedy: List independent servers in NODES." in out


def test_command_as_json(nodes, three):
    """The JSON has a version, the worst level, each node and each finding, and no password."""
    with override_settings(REDLOCK={"default": {"NODES": [three[0].replace("//", "//:sesame@"), *three[1:]]}}):
        out, _, code = run("redlock_doctor", "--format=json", "--using=default", "--fail-level=warning")

    data = json.loads(out)
    (alias,) = data["aliases"]
    assert (data["version"], data["level"], alias["using"], code) == (1, "warning", "default", 1)
    assert alias["nodes"][1]["role"] == "master"
    assert {"id", "level", "node", "text", "remedy"} == alias["findings"][0].keys()
    assert "sesame" not in out


def test_command_without_servers():
    """A wrong setting is an error and exits with 2; for nodes of other kinds there is only the trial."""
    with override_settings(REDLOCK={"default": {"NODES": []}}):
        _, error, code = run("redlock_doctor")
    assert ("(redlock.E003)" in error, code) == (True, 2)
    assert run("redlock_doctor", "--using=defautl")[2] == 2

    with override_settings(REDLOCK={"default": {"NODES": ["memory://a", "memory://b", "memory://c"]}}, DEBUG=True):
        out, _, code = run("redlock_doctor")
    assert ("a: not a server that can be inspected; it is tested with a lock." in out, code) == (True, 0)


def test_remedy_names_the_user_that_lacks_a_right(three):
    """The remedy names the node's user on the server, and can be typed as it stands; afterwards no right is missing."""
    with Server() as server, server.client() as client:
        client.execute_command("ACL", "SETUSER", "keychannel", *ACL[3:], "-publish", "-zrank")
        node = f"redis://keychannel:secret@127.0.0.1:{server.port}"
        refused = [finding for finding in found([node, *three[1:]]) if finding.id == "right"]
        assert {finding.text.split(" right ")[1].split(":")[0] for finding in refused} == {"+publish", "+zrank"}
        for finding in refused:
            client.execute_command(*finding.remedy.partition(",")[0].split())

        assert ids(found([node, *three[1:]])) == {}


def test_silenced_findings_are_not_reported(three):
    """A project silences a finding of the doctor, or a system check, once for both."""
    outside = [url.replace("127.0.0.1", "0.0.0.0") for url in three[:2]]  # this machine under another name
    assert ids(found(outside)) == {"no-tls": "warning", "redlock.W001": "warning"}

    with override_settings(SILENCED_SYSTEM_CHECKS=["redlock.no-tls", "redlock.W001"]):
        assert ids(found(outside)) == {}


WITHOUT_REDIS = """
import sys

sys.modules["redis"] = None  # importing it fails, as where it is not installed
from django.conf import settings

DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}}
NODES = ["database://default", "memory://a", "memory://b"]
settings.configure(
    DEBUG=True, INSTALLED_APPS=["django_redlock"], DATABASES=DATABASES, REDLOCK={"default": {"NODES": NODES}}
)
import django
from django.core.management import call_command

django.setup()
call_command("migrate", verbosity=0)
call_command("redlock_doctor")
"""


def test_doctor_of_a_project_without_redis_needs_no_redis_py(tmp_path: Path):
    """Each node is inspected by its own kind."""
    command = [sys.executable, "-c", WITHOUT_REDIS, str(tmp_path / "database")]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("it is tested with a lock") == 3
