"""The compose file of the example shop, started: needs a container engine with Compose, and the network to build."""

import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import needs
from tests.deployment import FOLDER, LOCKS, VALUES

LONGEST = 600  # seconds for one command; building the image downloads what is in it
TAKE = """
from django_redlock import lock
with lock('container', wait=120) as lease:
    print('token', lease.fencing_token)
"""


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """The shop, started under a name of its own; what runs a command of Compose, and returns its output."""
    needs("a container engine", shutil.which("docker"), "install Docker Engine with Compose, and start it")
    variables = tmp_path / "variables"
    variables.write_text("".join(f"{name}={value}\n" for name, value in VALUES.items()))
    project = ["--project-name", f"redlock-{uuid.uuid4().hex[:8]}", "--env-file", str(variables)]

    def compose(*arguments: str) -> str:
        command = ["docker", "compose", *project, "--file", "compose.yaml", *arguments]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=LONGEST, check=False)
        assert not done.returncode, done.stderr + done.stdout
        return done.stdout

    try:
        compose("up", "--build", "--wait")
        yield compose
    finally:
        compose("down", "--volumes", "--remove-orphans")


def test_shop_starts_and_takes_a_lock(shop: Callable[..., str]):
    """Everything becomes healthy; a lock can be taken after the restart guard, and while a lock server is down."""
    assert "token" in shop("exec", "-T", "web", "python", "manage.py", "shell", "-c", TAKE)

    shop("stop", LOCKS[0])
    assert "token" in shop("exec", "-T", "worker", "python", "manage.py", "shell", "-c", TAKE)
