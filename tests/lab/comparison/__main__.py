"""
Run every scenario with every package and print the table.

Each package has a server, a worker and a process of its own. All are used as their own documentation says, with their
default options. If a package keeps a lock for an hour, the run does not wait for it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from django_redlock.testing import Server, start_servers
from tests.lab import processes
from tests.lab.tables import heads, row
from tests.waiting import wait_until

OURS = "django-redlock"
PATIENCE = 45.0  # seconds within which a slot must be free again
HANGS = 20.0  # seconds after which a wait for a result counts as endless


class Stage:
    """The tools of a scenario: the tasks of one package, and the reports of their bodies."""

    def __init__(self, project: Any, visibility: str = "3600") -> None:
        self.project = project
        self.workers = [self._worker(visibility)]

    def _worker(self, visibility: str) -> subprocess.Popen[bytes]:
        options = ["--pool=prefork", "--concurrency=2", "--loglevel=ERROR"]
        worker = processes.worker("tests.lab.comparison.project", *options, COMPARE_VISIBILITY=visibility)
        wait_until(lambda: self.project.app.control.ping(timeout=0.5), seconds=60)
        return worker

    def new_worker(self, visibility: str = "3600") -> None:
        self.workers.append(self._worker(visibility))

    def end(self) -> None:
        processes.end(self.workers)

    def heard(self, what: str) -> list[tuple[str, int, float]]:
        """Return the reports of the bodies with one key."""
        lines = self.project.told.lrange(f"told:{what}", 0, -1)
        return [(event, int(pid), float(when)) for event, pid, when in (line.split() for line in lines)]

    def count(self, what: str, event: str) -> int:
        return sum(name == event for name, _, _ in self.heard(what))

    def wait(self, what: str, event: str, seconds: float = 20) -> int:
        """Wait for the next report of a body; return its process."""
        wait_until(lambda: self.count(what, event), seconds=seconds)
        return next(pid for name, pid, _ in self.heard(what) if name == event)

    def call(self, task: Any, *args: Any, **options: Any) -> Any:
        """Call a task; returns None if the package refuses it."""
        try:
            return task.apply_async(args, **options)
        except Exception as error:
            if type(error).__name__ in ("AlreadyQueued", "AlreadyQueuedError", "DuplicateTaskError", "OnceTaskLocked"):
                return None
            raise

    def runs_again(self, task: Any, what: str, seconds: float = 0.0, since: float | None = None) -> str:
        """Call a task with the same arguments until its body runs once more; return how long that took."""
        before, start = self.count(what, "began"), time.monotonic() if since is None else since
        while time.monotonic() < start + PATIENCE:
            self.call(task, what, seconds)
            with suppress(TimeoutError):
                wait_until(lambda: self.count(what, "began") > before, seconds=0.25)
                began = [when for event, _, when in self.heard(what) if event == "began"]
                return f"free after {max(0.0, began[before] - start):.1f} s"
        raise AssertionError(f"taken for more than {PATIENCE:.0f} s")

    def idle(self) -> bool:
        """Return whether the broker has no message, neither waiting nor with a worker."""
        return not self.project.told.llen("celery") and not self.project.told.hlen("unacked")


def retry(stage: Stage) -> str:
    stage.call(stage.project.again, "retry")
    stage.wait("retry", "first")
    try:
        stage.wait("retry", "ended", 15)
    except TimeoutError:
        raise AssertionError("the retry is lost") from None
    return "runs"


def child(stage: Stage) -> str:
    stage.call(stage.project.work, "child", 8.0)
    os.kill(stage.wait("child", "began"), signal.SIGKILL)
    return stage.runs_again(stage.project.work, "child", 8.0)


def worker(stage: Stage) -> str:
    stage.call(stage.project.work, "worker", 8.0)
    stage.wait("worker", "began")
    killed = time.monotonic()
    stage.end()
    stage.new_worker()
    return stage.runs_again(stage.project.work, "worker", 8.0, killed)


def limit(stage: Stage) -> str:
    stage.call(stage.project.limited, "limit", 60.0)
    stage.wait("limit", "began")
    (_, _, began), *_ = stage.heard("limit")
    outcome = stage.runs_again(stage.project.limited, "limit", 60.0, began + stage.project.LIMIT)
    stage.end()  # for some seconds a worker does nothing but kill the child that exceeded its limit
    stage.workers.clear()
    stage.new_worker()
    return outcome


def revoke(stage: Stage) -> str:
    result = stage.call(stage.project.work, "revoke", 0.0, countdown=3)
    result.revoke()
    return stage.runs_again(stage.project.work, "revoke")


def equal(stage: Stage) -> str:
    task = stage.project.work
    blocker = [stage.call(task, f"blocker {number}", 6.0) for number in range(2)]
    for number in range(2):
        stage.wait(f"blocker {number}", "began")
    for args, kwargs in ((["equal"], {}), ([], {"what": "equal"}), (["equal", 0.0], {})):
        with suppress(Exception):
            task.apply_async(args, kwargs)
    for result in blocker:
        with suppress(Exception):
            result.get(timeout=20)
    stage.wait("equal", "ended")
    wait_until(stage.idle, seconds=20)
    wait_until(lambda: stage.count("equal", "began") == stage.count("equal", "ended"), seconds=20)
    runs = stage.count("equal", "ended")
    assert runs == 1, f"{runs} runs of 3 equal calls"
    return "1 run"


def in_chord(stage: Stage) -> str:
    from celery import chord

    task = stage.project.work
    stage.call(task, "chord", 4.0)
    stage.wait("chord", "began")
    try:
        result = chord([task.si("other"), task.si("chord", 4.0)])(stage.project.total.s())
    except Exception as error:
        return f"refused ({type(error).__name__})"
    try:
        result.get(timeout=HANGS)
    except Exception as error:
        if type(error).__name__ == "TimeoutError":
            raise AssertionError("hangs for ever") from None
        return "fails at once"
    return "has a result"


def redelivery(stage: Stage) -> str:
    stage.end()
    stage.workers.clear()
    stage.new_worker("1")
    stage.new_worker("1")
    stage.call(stage.project.late, "late", 6.0)
    stage.wait("late", "ended", 30)
    with suppress(TimeoutError):
        wait_until(stage.idle, seconds=60)
    told = stage.heard("late")
    depth = most = 0
    for event, _, _ in sorted(told, key=lambda one: one[2]):
        depth += 1 if event == "began" else -1
        most = max(most, depth)
    begun = sum(event == "began" for event, _, _ in told)
    assert most == 1, f"{most} bodies at once"
    assert begun == 1, f"{begun} runs, one after the other"
    return "1 run"


def get_then_delay(stage: Stage, times: int = 500) -> str:
    task, lost = stage.project.work, 0
    for number in range(times):
        before = stage.project.told.llen("told:again")
        result = stage.call(task, "again")
        try:
            if result is None or not result.id:
                raise TimeoutError
            result.get(timeout=5, interval=0.001)
            lost += stage.project.told.llen("told:again") == before
        except Exception:
            lost += 1
            with suppress(TimeoutError):  # one that is only late does not count for the next
                wait_until(lambda before=before: stage.project.told.llen("told:again") > before, seconds=0.2)
        if number == 49 and lost > 25:
            raise AssertionError(f"{lost} of the first 50 lost")
    assert not lost, f"{lost} of {times} lost"
    return f"{times} of {times} run"


SCENARIOS: dict[str, Callable[[Stage], str]] = {
    "`self.retry()`": retry,
    "SIGKILL of the child": child,
    "SIGKILL of the worker": worker,
    "hard time limit": limit,
    "`revoke()` while it waits": revoke,
    "`f(1)`, `f(x=1)`, `f(1, y=default)`": equal,
    "duplicate in a chord": in_chord,
    "longer than the visibility timeout": redelivery,
    "`.get()`, then `.delay()`": get_then_delay,
}


def compete() -> None:
    """Run the scenarios with the package of this process; write a line of JSON for each."""
    from . import project

    stage = Stage(project)
    try:
        for name, scenario in SCENARIOS.items():
            try:
                outcome = [True, scenario(stage)]
            except AssertionError as error:
                outcome = [False, str(error)]
            except Exception as error:
                outcome = [False, f"{type(error).__name__}: {error}"[:80]]
            print(json.dumps([name, *outcome]), flush=True)
    finally:
        stage.end()


def main() -> int:
    from .project import CONTENDERS

    parser = argparse.ArgumentParser(prog="python -m tests.lab.comparison", description=__doc__)
    parser.parse_args()
    if "COMPARE" in os.environ:
        compete()
        return 0
    table: dict[str, dict[str, tuple[bool, str]]] = {}
    for package in CONTENDERS:
        try:
            title = f"{package} {version(package)}"
        except PackageNotFoundError:
            print(f"{package} is not installed; it is left out")
            continue
        table[title] = compare(package)
    print(markdown(table))
    ours = next((cells for title, cells in table.items() if title.startswith(OURS)), {})
    return 0 if all(ok for ok, _ in ours.values()) else 1


def compare(package: str) -> dict[str, tuple[bool, str]]:
    """Return the outcomes of one package, by scenario."""
    with Server() as broker, start_servers(3) as nodes:
        environment = processes.surroundings(
            COMPARE=package,
            COMPARE_URL=broker.url,
            DJANGO_SETTINGS_MODULE="tests.lab.settings",
            LAB_NODES=",".join(nodes.urls),
            LAB_OPTIONS='{"restart_guard": false, "node_timeout": 1.0}',
        )
        command = [sys.executable, "-m", "tests.lab.comparison"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    cells = {}
    for line in done.stdout.splitlines():
        name, ok, text = json.loads(line)
        cells[name] = (ok, text)
        print(f"{package}: {name}: {'ok' if ok else 'FAILS'}, {text}", file=sys.stderr, flush=True)
    return cells


def markdown(table: dict[str, dict[str, tuple[bool, str]]]) -> str:
    """Return the table as it stands in the docs; failures are bold."""
    lines = [heads(("", *table))]
    for name in SCENARIOS:
        cells = [column.get(name) for column in table.values()]
        shown = ["-" if cell is None else cell[1] if cell[0] else f"**{cell[1]}**" for cell in cells]
        lines.append(row((name, *shown)))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
