"""The compose file of the example shop, started: needs a container engine with Compose, and the network to build."""

import shutil
import subprocess
import uuid
from collections.abc import Iterator
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


class Compose:
    """One start of the compose file, under a name of its own."""

    def __init__(self, folder: Path) -> None:
        self.variables = folder / "variables"
        self.variables.write_text("".join(f"{name}={value}\n" for name, value in VALUES.items()))
        self.project = f"redlock-{uuid.uuid4().hex[:8]}"

    def __call__(self, *arguments: str) -> str:
        """Run a command of Compose; return its output."""
        options = ["--project-name", self.project, "--env-file", str(self.variables), "--file", "compose.yaml"]
        command = ["docker", "compose", *options, *arguments]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=LONGEST, check=False)
        assert not done.returncode, done.stderr + done.stdout
        return done.stdout


def engine_answers() -> bool:
    """Return whether there is an engine, running, with Compose."""
    if not shutil.which("docker"):
        return False
    asked = (["docker", "info"], ["docker", "compose", "version"])
    return not any(subprocess.run(each, capture_output=True, timeout=60, check=False).returncode for each in asked)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Compose]:
    needs("a container engine", engine_answers(), "install Docker Engine with Compose, and start it")
    compose = Compose(tmp_path)
    try:
        compose("up", "--build", "--wait")
        yield compose
    finally:
        compose("down", "--volumes", "--remove-orphans")


def test_shop_starts_and_takes_a_lock(shop: Compose):
    """
    Everything becomes healthy; a lock can be taken after the restart guard, and also while a lock server is down.
    """
    assert "token" in shop("exec", "-T", "web", "python", "manage.py", "shell", "-c", TAKE)

    shop("stop", LOCKS[0])
    assert "token" in shop("exec", "-T", "worker", "python", "manage.py", "shell", "-c", TAKE)
