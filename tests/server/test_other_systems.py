"""
Windows and macOS: locks work without what these systems lack, and what cannot work there says so.

tests/elsewhere.py hides it. ``python -m pytest -p tests.elsewhere`` runs any test so.
"""

import os
import select
import selectors
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.core.management import CommandError, call_command

from django_redlock.management.commands import redlock_run
from django_redlock.nodes import NodeSpec
from django_redlock.nodes.backends import open_node
from django_redlock.runtime.poll import ENDED, READABLE, poller
from django_redlock.testing import ServerNotFoundError, find_server, servers

CHECKOUT = Path(__file__).parents[2]
CHOSEN = [
    "tests/unit/locking/test_rounds.py",
    "tests/unit/locking/test_release_send.py",
    "tests/server/locking/test_links.py",
    "tests/server/locking/test_mending.py",
]


def test_locks_work_without_poll_fork_and_unix_sockets():
    """Rounds, connections, notifications and mended connections, blocking and asyncio, do not need them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.elsewhere", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])

    done = subprocess.run(
        [*command, "-m", "unit or server", *CHOSEN],
        cwd=CHECKOUT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert " passed" in done.stdout


def test_what_stands_for_poll_finds_what_can_be_read(monkeypatch: pytest.MonkeyPatch):
    """It waits for at most the given time, also without sockets, and reports a socket that was closed."""
    monkeypatch.delattr(select, "poll")
    monkeypatch.setattr(selectors, "DefaultSelector", selectors.SelectSelector)
    near, far = socket.socketpair()
    with near, far:
        poll = poller()
        assert poll.poll(1) == []
        poll.register(near, READABLE)
        assert poll.poll(1) == []
        far.send(b"!")
        fd = near.fileno()
        assert poll.poll(60_000) == [(fd, READABLE)]
        far.close()
        near.recv(1)
        assert poll.poll(60_000) == [(fd, READABLE | ENDED)]
        os.close(near.detach())
        assert poll.poll(60_000) == [(fd, READABLE | ENDED)]
        poll.unregister(fd)
        assert poll.poll(1) == []


def test_what_cannot_work_says_so(monkeypatch: pytest.MonkeyPatch):
    """A Unix socket, a program under a lock, and a server for tests."""
    monkeypatch.delattr(socket, "AF_UNIX")
    with pytest.raises(ValueError, match="this system has no Unix sockets: write a redis:// URL"):
        open_node(NodeSpec("unix:///run/valkey.sock"), "t:")
    for module in (servers, redlock_run):
        monkeypatch.setattr(module, "os", SimpleNamespace(name="nt"))
    with pytest.raises(CommandError, match="process groups and signals, which this system does not have"):
        call_command("redlock_run", "job", "--", "program")
    with pytest.raises(ServerNotFoundError, match=r"on Linux and macOS only\. Elsewhere, use nodes in memory"):
        find_server()
