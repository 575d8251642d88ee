"""Releases that are sent without waiting for the replies, over real servers: ends of processes, faults, order."""

import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from django_redlock import LockManager
from django_redlock.testing import FaultProxy, Servers
from tests.managers import eventually, fork, held_by, in_threads, patient_manager, real_manager

KEY = "t:{a}:h"


class Outcomes(list[str]):
    """The outcomes of the releases of a manager."""

    def __init__(self, manager: LockManager) -> None:
        super().__init__()
        manager.notify = self._note

    def _note(self, event: str, **about: Any) -> None:
        if event == "lock_released":
            self.append(str(about["outcome"]))


async def test_many_releases_in_a_row_are_all_reported(nodes: Servers):
    """Each round reads the replies to the release before it, and no outcome is lost."""
    manager = patient_manager(nodes.urls[:3])
    outcomes = Outcomes(manager)

    for _ in range(100):
        with manager.lock("a", wait=0, release="send"):
            pass

    await eventually(lambda: outcomes == ["released"] * 100)


async def test_threads_take_their_own_lock_again_at_once(nodes: Servers):
    """Each thread sends its next attempt behind its release, on the same connections, whatever others do."""
    manager = patient_manager(nodes.urls[:3])
    manager.lock("warm up").acquire().release()

    def work(number: int) -> None:
        for _ in range(60):
            with manager.lock(f"a{number}", wait=0, release="send"):
                pass

    in_threads(6, work)


async def test_release_waits_for_links_if_other_threads_use_all(nodes: Servers):
    """A release without an idle connection is not left to the background, where the next attempt would overtake it."""
    with FaultProxy(nodes[0].url) as far, closing(patient_manager([far.url])) as manager:
        lease = manager.lock("a", release="send").acquire()
        far.delay(0.2)
        other = threading.Thread(target=lambda: manager.lock("b").acquire().release())
        other.start()
        await eventually(lambda: not manager.driver.gather.idle.sets)

        outcome = lease.release(wait=False)

        other.join()
        assert outcome == "released"
        with manager.lock("a", wait=0):
            pass


# The ends of a process

ENDS = {
    "return": "",
    "exit": "sys.exit(3)",
    "unknown to Python": "os._exit(0)",
    "exit handler": "import atexit; first()",
    "thread": "import threading; threading.Thread(target=work).start()",
    "event loop": "import asyncio; asyncio.run(awork())",
    "event loop that is only closed": """
import asyncio
loop = asyncio.new_event_loop()
loop.run_until_complete(awork())
loop.close()
""",
}

PROGRAM = """
import atexit, os, sys
BEFORE = []  # exit handlers run in reverse: this one runs after that of the package
atexit.register(lambda: [each() for each in BEFORE])
from django.conf import settings
settings.configure(REDLOCK={"default": {"NODES": sys.argv[1:], "KEY_PREFIX": "t:", "OPTIONS":
    {"restart_guard": False, "node_timeout": 5.0, "ttl": 60.0, "release": "send"}}})
from django_redlock import lock

def work():
    with lock("a"):
        pass

async def awork():
    async with lock("a"):
        pass

def first():
    BEFORE.append(work)

work()
"""


@pytest.mark.parametrize("end", ENDS)
def test_release_is_sent_before_the_process_ends(nodes: Servers, end: str):
    """Whatever ends the process, the release has been sent, and no key stays."""
    program = PROGRAM + ENDS[end]
    root = Path(__file__).parents[3]

    done = subprocess.run(
        [sys.executable, "-c", program, *nodes.urls[:3]], cwd=root, capture_output=True, text=True, timeout=120
    )

    # In an exit handler, Python 3.12 starts no thread that could extend the lease, and the log says so.
    said = [line for line in done.stderr.splitlines() if "can't create new thread at interpreter shutdown" not in line]
    assert (said, done.returncode) == ([], 3 if end == "exit" else 0)
    manager = real_manager(nodes.urls[:3])
    assert held_by(manager, "{a}")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # on purpose; Python 3.15 raises it
def test_child_forked_with_a_release_in_flight(nodes: Servers):
    """The child reports nothing, and its own locks work; the parent gets the replies to its release."""
    manager = patient_manager(nodes.urls[:3])
    outcomes = Outcomes(manager)

    def child() -> int:
        if not (pid := os.fork()):
            with manager.lock("b", wait=0, release="send"):
                pass
            manager.close()
            os._exit(0 if outcomes == ["released"] else 1)
        return os.waitpid(pid, 0)[1]

    def parent() -> int:
        with manager.lock("a", release="send"):
            pass
        status = child()
        manager.close()
        return status or outcomes != ["released"]

    assert fork(parent) == 0
