"""
Tests during which the machine stood still run again: a pytest plugin, and the process that watches the machine.

Leases, timeouts and the order of waiters are about time, and real servers on a virtual machine now and then stand
still for half a second, while the clock goes on. A test that fails in such a moment has proven nothing. A process of
its own measures how late each core wakes it up; a test that failed, and during which it was late, runs again, twice
at most, and the end of the run names it. A test that fails on a machine that did not stand still, fails; so does one
that is marked ``timeless``, or marks itself so before it says that what must never happen has happened.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TextIO

TICK = 0.02  # seconds of sleep between two looks at the clock
LATE = 0.05  # seconds; what is shorter is a busy machine, and no test minds that
ENOUGH = 0.1  # seconds of standing still, in all, that excuse a failure
TRIES = 3
PATH = "REDLOCK_TEST_STALLS"  # where the watching process writes; pytest-xdist's workers inherit it
RAN_AGAIN = "ran again"


def watch(path: str) -> None:
    """Write when the machine stood still, and for how long, until our parent is gone."""
    parent = os.getppid()
    with open(path, "a", buffering=1) as file:
        for core in sorted(os.sched_getaffinity(0))[:8]:
            Thread(target=watch_core, args=(core, file), daemon=True).start()
        while os.getppid() == parent:
            time.sleep(1)


def watch_core(core: int, file: TextIO) -> None:
    """Write ``end duration`` for each time that this core woke us up too late."""
    os.sched_setaffinity(0, {core})  # of this thread
    before = time.monotonic()
    while True:
        time.sleep(TICK)
        now = time.monotonic()
        late = now - before - TICK
        if late >= LATE:
            print(now, late, file=file)
        before = now


def stood_still(since: float) -> float:
    """Return for how many seconds, in all, the machine stood still since a moment of the monotonic clock."""
    return sum(late for end, late in stalls() if end > since)


def stalls() -> Iterator[tuple[float, float]]:
    """Yield the end and the duration of each time that the machine stood still."""
    for line in Path(os.environ[PATH]).read_text().splitlines():
        with suppress(ValueError):  # a line that is being written
            end, late = map(float, line.split())
            yield end, late


if __name__ == "__main__":
    watch(sys.argv[1])
else:
    import pytest
    from _pytest.runner import runtestprotocol

    def pytest_configure(config: pytest.Config) -> None:
        if PATH in os.environ or not hasattr(os, "sched_setaffinity"):
            return
        handle, os.environ[PATH] = tempfile.mkstemp(prefix="stalls")
        os.close(handle)
        watcher = subprocess.Popen([sys.executable, __file__, os.environ[PATH]])

        def end() -> None:
            watcher.kill()
            watcher.wait()
            os.unlink(os.environ.pop(PATH))

        config.add_cleanup(end)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if PATH not in os.environ:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for attempt in range(TRIES):
            began = time.monotonic()
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            if not any(report.failed for report in reports):
                break
            close_connections()
            if attempt == TRIES - 1:
                break
            still = stood_still(began)
            if still < ENOUGH or item.get_closest_marker("timeless"):
                break
            what = next(report.longreprtext.strip().splitlines()[-1] for report in reports if report.failed)
            item.user_properties.append((RAN_AGAIN, f"the machine stood still for {still:.1f} s; before: {what}"))
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def close_connections() -> None:
        """Close what a test that failed has left open, or the warning of it fails another test."""
        locks = sys.modules.get("django_redlock.locks")
        for manager in list(locks._managers) if locks else ():
            manager.close()

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
        again = {report.nodeid: reasons(report) for report in reports if reasons(report)}
        if again:
            terminalreporter.section(f"ran again: {len(again)}")
        for nodeid, why in again.items():
            terminalreporter.line(f"{nodeid}: {'; '.join(why)}")

    def reasons(report: pytest.TestReport) -> list[str]:
        """Return why a test ran again, each time that it did."""
        return [str(text) for name, text in getattr(report, "user_properties", ()) if name == RAN_AGAIN]
