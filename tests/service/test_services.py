"""The launcher of PostgreSQL, MariaDB and RabbitMQ: private, started on demand, killed and frozen on command."""

import os
import subprocess
import sys
import tempfile

import pytest

from django_redlock.testing.servers import spawn
from tests.services import PostgreSQL, Service, ServiceMissingError, ended
from tests.waiting import wait_until

START_AND_DIE = """
import os, signal, sys
from tests import services
service = getattr(services, sys.argv[1])().start()
print(*service.family(), flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


# These tests cover the launcher; the two services that start slowly use it in the same way.
SLOW = [pytest.param(name, marks=pytest.mark.endurance) for name in ("mariadb", "rabbitmq")]


@pytest.fixture(params=["postgresql", *SLOW])
def service(request) -> Service:
    """Each kind of service in turn."""
    found = request.getfixturevalue(request.param)
    if not found.ours:
        pytest.skip(f"{found.variable} names a server that is not ours to kill")
    return found


def test_services_end_with_their_process(service):
    """A test run that is killed leaves no server behind."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # the server's user must reach it
        environment = {**os.environ, "TMPDIR": folder}
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", START_AND_DIE, type(service).__name__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as parent:
            assert parent.stdin is not None
            assert parent.stdout is not None
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert not all(map(ended, pids))

            parent.stdin.close()

            wait_until(lambda: all(map(ended, pids)))


def test_missing_program_says_what_to_type(monkeypatch):
    """Without the program, the error names the package, and the variable that can name a running server."""
    monkeypatch.setattr(PostgreSQL, "program", "/nowhere/*/postgres")
    monkeypatch.delenv("REDLOCK_POSTGRESQL", raising=False)

    with pytest.raises(ServiceMissingError, match="apt-get install postgresql, or set REDLOCK_POSTGRESQL"):
        PostgreSQL()


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can run a program as another user")
def test_program_of_another_user_ends_with_its_parent(tmp_path):
    """A program started as another user still gets SIGKILL when its parent dies."""
    child = spawn(["id", "-un"], user="nobody", stdout=subprocess.PIPE)

    assert child.communicate(timeout=120)[0] == b"nobody\n"
