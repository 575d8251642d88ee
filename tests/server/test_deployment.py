"""The lock server of the compose file and of the Kubernetes manifests, started with an embedded server."""

from pathlib import Path
from typing import Any

import pytest
import redis

from django_redlock import lock, locks
from django_redlock.testing import Server
from tests.deployment import environments, lock_commands, lock_users


@pytest.mark.parametrize("file", ["compose", "kubernetes"])
def test_lock_server_serves_the_locks_of_the_shop_and_nothing_else(file: str, tmp_path: Path, settings: Any):
    """The shop takes its locks, the health check gets a PONG, and no other user, key or command is allowed."""
    users, command, password = tmp_path / "users.acl", lock_commands()[file][1:], environments()[file]["LOCKS_PASSWORD"]
    users.write_text(lock_users()[file])
    command[command.index("--aclfile") + 1] = str(users)
    with Server(args=command) as server:
        login = {"username": "locks", "password": password}
        settings.REDLOCK = {"default": {"NODES": [{"URL": server.url, "OPTIONS": login}], "KEY_PREFIX": "shop"}}
        with lock("a", wait=0) as lease:
            assert lease.extend()
        locks.reset()

        assert server.client(username="health", password="none").ping()
        for asked in (login, {"username": "health", "password": "none"}):
            with pytest.raises(redis.exceptions.NoPermissionError):
                server.client(**asked).get("another:key")
        with pytest.raises(redis.AuthenticationError):
            server.client().ping()
