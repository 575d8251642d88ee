"""
During a deployment, processes of the last release and of this version take the same locks on the same nodes.

``REDLOCK_LAST_RELEASE`` names the wheel of the last release. Without it, as before the first release, a copy of this
version stands for it.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import django_redlock
from django_redlock import LockTakenError
from django_redlock.testing import Servers
from tests.managers import real_manager

PACKAGE = Path(django_redlock.__file__).parent
ROUNDS = 25
CONTENDER = """
import sys
from pathlib import Path
from django.conf import settings
root, counter, rounds, *nodes = sys.argv[1:]
redlock = {"default": {"NODES": nodes, "KEY_PREFIX": "t", "OPTIONS": {"restart_guard": False, "node_timeout": 2}}}
settings.configure(REDLOCK=redlock)
import django_redlock
assert Path(django_redlock.__file__).parents[1].samefile(root), django_redlock.__file__
counter = Path(counter)
for _ in range(int(rounds)):
    with django_redlock.lock("counter", wait=120):
        before = int(counter.read_text())
        counter.write_text(str(before + 1))
if rounds == "0":
    with django_redlock.lock("held", wait=0, label="the other version"):
        print("held", flush=True)
        sys.stdin.read()
"""


@pytest.fixture(scope="module")
def last_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package of the last release."""
    folder = tmp_path_factory.mktemp("last-release")
    if wheel := os.environ.get("REDLOCK_LAST_RELEASE"):
        zipfile.ZipFile(wheel).extractall(folder)
    else:
        shutil.copytree(PACKAGE, folder / PACKAGE.name)
    return folder


def start(folder: Path, counter: Path, rounds: int, nodes: Servers) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", CONTENDER, str(folder), str(counter), str(rounds), *nodes.urls[:3]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(folder)}, text=True, **pipes)


def test_two_versions_exclude_each_other(last_release: Path, nodes: Servers, tmp_path: Path):
    """Two processes of each version count in one file, and no count is lost; all of them wait in one queue."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    contenders = [start(folder, counter, ROUNDS, nodes) for folder in (last_release, PACKAGE.parent) * 2]

    assert [contender.communicate()[1] for contender in contenders] == [""] * 4
    assert int(counter.read_text()) == 4 * ROUNDS


def test_holder_of_the_last_release_is_known_by_name(last_release: Path, nodes: Servers, tmp_path: Path):
    """This version reads who holds a lock, and gets the lock as soon as that holder releases it."""
    manager = real_manager(nodes.urls[:3], prefix="t:")
    with start(last_release, tmp_path, 0, nodes) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockTakenError, match="the other version"):
            manager.lock("held", wait=0).acquire()
        holder.communicate("")
    with manager.lock("held", wait=60):
        assert holder.returncode == 0
