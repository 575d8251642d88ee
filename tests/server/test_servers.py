"""The launcher of real servers: they start fast, fail on command, and never stay behind."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import redis

from django_redlock.testing import Server, ServerNotFoundError, Servers, ServerStartError, find_server
from tests.conftest import needs
from tests.services import ended
from tests.waiting import wait_until

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")

START_TWO_AND_WAIT = """
import sys, time
from django_redlock.testing import start_servers
servers = start_servers(2)
servers[0].freeze()
print(*(server.pid for server in servers), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server(nodes: Servers) -> Server:
    return nodes[0]


def ping(server: Server) -> bool:
    with server.client() as client:
        return bool(client.ping())


def test_killed_server_refuses_until_it_is_started(server):
    """A crashed node refuses connections, and comes back on its port without data."""
    port = server.port
    with server.client() as client:
        client.set("a", "1")

    server.kill()

    assert not server.running
    with pytest.raises(redis.ConnectionError):
        ping(server)
    server.start()
    assert server.port == port
    with server.client() as client:
        assert client.get("a") is None


def test_frozen_server_answers_once_thawed(server):
    """A frozen node accepts requests and answers none; after it thaws, it executes them."""
    with server.client(socket_timeout=0.1) as client, server.client() as reader:
        client.ping()
        server.freeze()
        with pytest.raises(redis.TimeoutError):
            client.set("a", "1")

        server.thaw()

        assert reader.get("a") == "1"


def test_port_of_a_dead_server_is_given_to_nobody(server):
    """Thousands of connections elsewhere do not cost a killed server its port."""
    server.kill()
    with Servers(1) as others, others[0].client() as client:
        for _ in range(200):
            client.ping()
            client.connection_pool.disconnect()

    assert server.start().running


def test_server_of_another_system_has_a_port_that_no_client_gets(monkeypatch):
    """Where a port cannot be held, connections elsewhere do not cost a server its port before it starts."""
    monkeypatch.setattr("sys.platform", "darwin")

    assert all(Server().port < 32_768 for _ in range(20))


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_server_ends_in_every_state(end):
    """Stopping and killing work on a frozen server, too, and twice is no error."""
    with Server() as server:
        pid = server.pid
        server.freeze()

        getattr(server, end)()
        getattr(server, end)()

        assert not server.running
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(ProcessLookupError, match="is not running"):
            _ = server.pid


@pytest.mark.parametrize(("keep_data", "found"), [(True, "1"), (False, None)])
def test_restart_keeps_data_only_when_asked(server, keep_data, found):
    """A node comes back with its memory, or without, on the same port."""
    with server.client() as client:
        client.set("a", "1")
    before = server.pid, server.port

    server.restart(keep_data=keep_data)

    assert server.pid != before[0]
    assert server.port == before[1]
    with server.client() as client:
        assert client.get("a") == found


def test_durable_server_remembers_through_a_crash():
    """Arguments for the server override the launcher's own: this one writes everything to disk."""
    with Server(args=("--appendonly", "yes", "--appendfsync", "always")) as server:
        with server.client() as client:
            client.set("a", "1")
        server.kill()
        server.start()
        with server.client() as client:
            assert client.get("a") == "1"
        server.restart(keep_data=False)
        with server.client() as client:
            assert client.get("a") is None


def test_password_is_needed_and_not_shown():
    """The URL carries the password, quoted; repr() does not."""
    with Server(password="p@ss/wörd") as server:
        assert ping(server)
        with (
            redis.Redis.from_url(f"redis://127.0.0.1:{server.port}") as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        assert "p@ss" not in repr(server)
        assert str(server.port) in repr(server)


def test_reset_brings_back_what_a_test_broke(nodes):
    """After reset() all servers run, answer and are empty."""
    for server, harm in zip(nodes, ("freeze", "kill", "stop"), strict=False):
        with server.client() as client:
            client.set("a", "1")
        getattr(server, harm)()

    nodes.reset()

    for server in nodes:
        with server.client() as client:
            assert client.dbsize() == 0


def test_failed_start_shows_the_servers_output():
    """A server that does not start leaves its own words in the error, and no process."""
    server = Server(args=("--no-such-option", "1"))

    with pytest.raises(ServerStartError, match=r"(?s)did not start.*no-such-option"):
        server.start()

    assert not server.running


def test_servers_start_all_or_none():
    """When one server does not start, those that did are stopped."""
    servers = Servers(3)
    servers[1].args = ("--no-such-option", "1")

    with pytest.raises(ServerStartError):
        servers.start()

    assert not any(server.running for server in servers)


def test_missing_server_says_what_to_type(monkeypatch):
    """Without the wheel and without REDLOCK_SERVER, the error names both remedies."""
    monkeypatch.delenv("REDLOCK_SERVER", raising=False)
    monkeypatch.setattr("django_redlock.testing.servers.find_spec", lambda name: None)

    with pytest.raises(ServerNotFoundError, match=r"pip install .*\[testing\].* or set REDLOCK_SERVER="):
        Server().start()
    monkeypatch.setenv("REDLOCK_SERVER", "/no/such/redis-server")
    with pytest.raises(ServerNotFoundError, match="REDLOCK_SERVER=/no/such/redis-server is not a program"):
        find_server()


def test_redis_server_of_the_system_can_be_used(monkeypatch):
    """REDLOCK_SERVER replaces the embedded Valkey with a Redis server."""
    found = shutil.which("redis-server")
    needs("redis-server", found, "apt-get install redis-server")
    monkeypatch.setenv("REDLOCK_SERVER", "redis-server")

    with Server() as server, server.client() as client:
        info = client.info("server")

    assert Path(str(found)) == find_server()
    assert "valkey_version" not in info


def test_files_go_with_the_server(tmp_path, monkeypatch):
    """A server works in a private folder, which is removed at the end."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Server() as server:
        server.restart(keep_data=True)
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o077 == 0
        assert (folder / "dump.rdb").exists()

    assert list(tmp_path.iterdir()) == []


def test_server_outlives_the_thread_that_started_it():
    """Linux ties a process to a thread; a server started in a short-lived thread stays."""
    with Server() as server:
        server.stop()
        thread = threading.Thread(target=server.start)
        thread.start()
        thread.join()

        assert ping(server)


@linux_only
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_servers_end_when_their_parent_is_killed(how, tmp_path):
    """Nothing stays behind when exit hooks do not run, not even a frozen server."""
    command = [sys.executable, "-W", "ignore", "-c", START_TWO_AND_WAIT]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed parent cannot clean up
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert not any(map(ended, pids))

        parent.send_signal(how)

        wait_until(lambda: all(map(ended, pids)))
