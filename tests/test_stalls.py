"""A test that failed while the machine stood still runs again; one that just fails does not."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import os
import time
from pathlib import Path

def run(name, stalls):
    counter = Path(__file__).with_name(name)
    before = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(before + 1))
    if stalls:
        with open(os.environ["REDLOCK_TEST_STALLS"], "a") as file:
            print(time.monotonic(), 0.3, file=file)
    return before

def test_stalled_once():
    assert run("once", stalls=True)

def test_stalled_always():
    assert run("always", stalls=True) < 0

def test_just_fails():
    assert run("fails", stalls=False)

def test_never_again(request):
    request.node.add_marker("timeless")
    assert run("timeless", stalls=True)
"""


def test_what_failed_on_a_machine_that_stood_still_runs_again(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(TESTS)
    options = ["-p", "tests.stalls", "-p", "no:django", "-p", "no:valkey", "-p", "no:cacheprovider", "-c", os.devnull]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("REDLOCK_", "PYTEST_"))}

    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=Path(__file__).parents[1],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )

    runs = {name: int((tmp_path / name).read_text()) for name in ("once", "always", "fails", "timeless")}
    assert runs["once"] == 2, ended.stdout
    assert runs["always"] == 3
    assert runs["timeless"] == 1
    assert runs["fails"] == 1 or "test_just_fails: the machine stood still" in ended.stdout
    assert "3 failed, 1 passed" in ended.stdout
    assert "test_stalled_once: the machine stood still for 0.3 s" in ended.stdout
