"""
Run every scenario with every package and print the table.

Each package has a server, a worker and a process of its own. All are used as their own documentation says, with their
default options. If a package keeps a lock for an hour, the run does not wait for it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from typing import Any

from django_redlock.testing import Server, start_servers
from tests.lab import processes
from tests.lab.tables import heads, row
from tests.waiting import wait_until

from . import project
from .project import CONTENDERS, LIMIT, again, app, late, limited, told, total, work

PATIENCE = 45.0  # seconds within which a slot must be free again
HANGS = 20.0  # seconds after which a wait for a result counts as endless
REFUSALS = ("AlreadyQueued", "AlreadyQueuedError", "DuplicateTaskError", "OnceTaskLocked")

workers: list[subprocess.Popen[bytes]] = []


def new_worker(visibility: str = "3600") -> None:
    options = ["--pool=prefork", "--concurrency=2", "--loglevel=ERROR"]
    workers.append(processes.worker(project.__name__, *options, COMPARE_VISIBILITY=visibility))
    wait_until(lambda: app.control.ping(timeout=0.5), seconds=60)


def end_workers() -> None:
    processes.end(workers)
    workers.clear()


def heard(what: str, wanted: str) -> list[tuple[int, float]]:
    """Return the process and the time of each report of the bodies with one key."""
    lines = [line.split() for line in told.lrange(f"told:{what}", 0, -1)]
    return [(int(pid), float(when)) for event, pid, when in lines if event == wanted]


def wait(what: str, event: str, seconds: float = 20) -> int:
    """Wait for the next report of a body; return its process."""
    wait_until(lambda: heard(what, event), seconds=seconds)
    return heard(what, event)[0][0]


def call(task: Any, *args: Any, **options: Any) -> Any:
    """Call a task; returns None if the package refuses it."""
    try:
        return task.apply_async(args, **options)
    except Exception as error:
        if type(error).__name__ in REFUSALS:
            return None
        raise


def runs_again(task: Any, what: str, seconds: float = 0.0, since: float | None = None) -> str:
    """Call a task with the same arguments until its body runs once more; return how long that took."""
    before, start = len(heard(what, "began")), time.monotonic() if since is None else since
    while time.monotonic() < start + PATIENCE:
        call(task, what, seconds)
        with suppress(TimeoutError):
            wait_until(lambda: len(heard(what, "began")) > before, seconds=0.25)
            return f"free after {max(0.0, heard(what, 'began')[before][1] - start):.1f} s"
    raise AssertionError(f"taken for more than {PATIENCE:.0f} s")


def idle() -> bool:
    """Return whether the broker has no message, neither waiting nor with a worker."""
    return not told.llen("celery") and not told.hlen("unacked")


def retry() -> str:
    call(again, "retry")
    wait("retry", "first")
    try:
        wait("retry", "ended", 15)
    except TimeoutError:
        raise AssertionError("the retry is lost") from None
    return "runs"


def child() -> str:
    call(work, "child", 8.0)
    os.kill(wait("child", "began"), signal.SIGKILL)
    return runs_again(work, "child", 8.0)


def worker() -> str:
    call(work, "worker", 8.0)
    wait("worker", "began")
    killed = time.monotonic()
    end_workers()
    new_worker()
    return runs_again(work, "worker", 8.0, killed)


def limit() -> str:
    call(limited, "limit", 60.0)
    wait("limit", "began")
    outcome = runs_again(limited, "limit", 60.0, heard("limit", "began")[0][1] + LIMIT)
    end_workers()  # for some seconds a worker does nothing but kill the child that exceeded its limit
    new_worker()
    return outcome


def revoke() -> str:
    call(work, "revoke", 0.0, countdown=3).revoke()
    return runs_again(work, "revoke")


def equal() -> str:
    blockers = [call(work, f"blocker {number}", 6.0) for number in range(2)]
    for number in range(2):
        wait(f"blocker {number}", "began")
    for args, kwargs in ((["equal"], {}), ([], {"what": "equal"}), (["equal", 0.0], {})):
        with suppress(Exception):
            work.apply_async(args, kwargs)
    for result in blockers:
        with suppress(Exception):
            result.get(timeout=20)
    wait("equal", "ended")
    wait_until(lambda: idle() and len(heard("equal", "began")) == len(heard("equal", "ended")), seconds=20)
    runs = len(heard("equal", "ended"))
    assert runs == 1, f"{runs} runs of 3 equal calls"
    return "1 run"


def in_chord() -> str:
    from celery import chord

    call(work, "chord", 4.0)
    wait("chord", "began")
    try:
        result = chord([work.si("other"), work.si("chord", 4.0)])(total.s())
    except Exception as error:
        return f"refused ({type(error).__name__})"
    try:
        result.get(timeout=HANGS)
    except Exception as error:
        if type(error).__name__ == "TimeoutError":
            raise AssertionError("hangs for ever") from None
        return "fails at once"
    return "has a result"


def redelivery() -> str:
    end_workers()
    new_worker("1")
    new_worker("1")
    call(late, "late", 6.0)
    wait("late", "ended", 30)
    with suppress(TimeoutError):
        wait_until(idle, seconds=60)
    began, ended = ([when for _, when in heard("late", event)] for event in ("began", "ended"))
    most = max(sum(each <= when for each in began) - sum(each < when for each in ended) for when in began)
    assert most == 1, f"{most} bodies at once"
    assert len(began) == 1, f"{len(began)} runs, one after the other"
    return "1 run"


def get_then_delay() -> str:
    lost = 0
    for number in range(500):
        before = told.llen("told:again")
        result = call(work, "again")
        try:
            if result is None or not result.id:
                raise TimeoutError
            result.get(timeout=5, interval=0.001)
            lost += told.llen("told:again") == before
        except Exception:
            lost += 1
            with suppress(TimeoutError):  # one that is only late does not count for the next
                wait_until(lambda before=before: told.llen("told:again") > before, seconds=0.2)
        if number == 49 and lost > 25:
            raise AssertionError(f"{lost} of the first 50 lost")
    assert not lost, f"{lost} of 500 lost"
    return "500 of 500 run"


SCENARIOS: dict[str, Callable[[], str]] = {
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
    """Run the scenarios with the package of this process, and print the outcome of each; failures are bold."""
    new_worker()
    try:
        for scenario in SCENARIOS.values():
            try:
                outcome = scenario()
            except Exception as error:
                words = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"[:80]
                outcome = f"**{' '.join(words.split())}**"
            print(outcome, flush=True)
    finally:
        end_workers()


def compare(package: str) -> list[str]:
    """Return the outcomes of one package."""
    with Server() as broker, start_servers(3) as nodes:
        environment = processes.surroundings(
            COMPARE=package,
            COMPARE_URL=broker.url,
            DJANGO_SETTINGS_MODULE="tests.lab.settings",
            LAB_NODES=",".join(nodes.urls),
            LAB_OPTIONS='{"restart_guard": false, "node_timeout": 1.0}',
        )
        command = [sys.executable, "-m", "tests.lab.comparison"]
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def main() -> int:
    """Print the table; return 1 if this package fails in a scenario."""
    table = {}
    for package in CONTENDERS:
        try:
            title = f"{package} {version(package)}"
        except PackageNotFoundError:
            print(f"{package} is not installed; it is left out")
        else:
            table[title] = compare(package)
    print(heads(("", *table)))
    for line in zip_longest(SCENARIOS, *table.values(), fillvalue="-"):
        print(row(line))
    ours = next(outcomes for title, outcomes in table.items() if title.startswith("django-redlock"))
    return int(any(outcome.startswith("**") for outcome in ours))


if __name__ == "__main__":
    if "COMPARE" in os.environ:
        compete()
    else:
        sys.exit(main())
