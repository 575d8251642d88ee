"""The end of the interpreter while something still holds a lock, or a thread is at work."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from django_redlock.testing import Servers
from tests.deployment import CHECKOUT

BEFORE = """
import sys
from django.conf import settings
options = {"restart_guard": False, "node_timeout": 2.0, "ttl": 10.0}
settings.configure(REDLOCK={"default": {"NODES": sys.argv[1:], "OPTIONS": options}})
from django_redlock import lock
"""

HOLDERS = {
    "generator": """
def rows():
    with lock("e"):
        yield
suspended = rows()
next(suspended)
""",
    "coroutine": """
import asyncio
async def rows():
    async with lock("e"):
        yield
async def begin():
    global suspended
    suspended = rows()
    await anext(suspended)
loop = asyncio.new_event_loop()
loop.run_until_complete(begin())
""",
    "taken by the end": """
class Last:
    def __del__(self, lock=lock("f", wait=None)):
        try:
            lock.acquire()
        except RuntimeError:
            pass
last = Last()
""",
}


def ended(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a script to its end, without the warnings of Python."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-X", "faulthandler", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT), "PYTHONDEVMODE": ""},
    )


@pytest.mark.parametrize("holder", HOLDERS)
def test_interpreter_ends_in_silence_while_something_holds_a_lock(nodes: Servers, holder: str):
    """When the interpreter is torn down nothing connects, waits or prints; the key ends with its lease."""
    done = ended(BEFORE + HOLDERS[holder] + "print('held')\n", *nodes.urls[:3])

    assert (done.stdout, done.stderr, done.returncode) == ("held\n", "", 0)
    if "taken" not in holder:  # nothing was sent, not even a release
        with nodes[0].client() as client:
            assert client.exists("redlock:{e}:h")


ENDING = """
import atexit, os, threading
def attempt(when, lock=lock("g", wait=5), write=os.write):
    try:
        with lock as lease:
            lease.ensure()
        write(1, f"{when}: taken\\n".encode())
    except RuntimeError as error:
        write(1, f"{when}: {error}\\n".encode())
def outlive():
    threading.main_thread().join()
    attempt("thread")
class Last:
    def __del__(self, attempt=attempt):
        attempt("__del__")
last = Last()
atexit.register(attempt, "atexit")
threading.Thread(target=outlive).start()
"""


def test_lock_can_be_taken_until_the_interpreter_is_torn_down(nodes: Servers):
    """Functions of ``atexit`` and threads that outlive the main thread get it; a late ``__del__()`` an error."""
    done = ended(BEFORE + ENDING, *nodes.urls[:3])

    refused = "__del__: Lock 'g' cannot be taken: the interpreter is about to end."
    assert done.stdout.splitlines() == ["thread: taken", "atexit: taken", refused]


UNDER_GEVENT = {
    "closed manager": """
REAL = hub.Hub.destroy
def destroy(self, **options):
    naps()
    REAL(self, **options)
hub.Hub.destroy = destroy
with manager.lock("a"):
    pass
manager.close()
""",
    "callback": """
lease = manager.lock("a", renew=False).acquire()
logging.disable()
lease.on_lost(lambda lease: naps())
lease.hold.deadline = 0.0
watchdog.watchdog.watch(lease)
while not begun:
    time.sleep(0.001)
""",
    "renewal": """
def extend(leases, ttl=None):
    naps()
    return 0
manager.extend = extend
lease = manager.lock("a").acquire()
lease.hold._renew_at = 0.0
watchdog.watchdog.watch(lease)
while not begun:
    time.sleep(0.001)
""",
}
"""Work that keeps a thread of the operating system in its event loop while the process ends."""


@pytest.mark.parametrize("busy", UNDER_GEVENT)
def test_interpreter_ends_under_gevent_while_threads_are_in_their_event_loops(busy: str):
    """Python up to 3.13 unwinds the stack of a thread that it ends, and greenlet's part of it would crash."""
    if not find_spec("gevent"):
        pytest.skip("needs gevent: pip install gevent")
    script = """
from gevent import monkey
monkey.patch_all()
import logging
import time
from gevent import hub
from django_redlock.core.rules import Rules
from django_redlock.engine import watchdog
from django_redlock.engine.manager import LockManager
from django_redlock.nodes import NodeSpec
from django_redlock.nodes.backends import open_node

begun = []
def naps():
    begun.append(1)
    for _ in range(300):
        time.sleep(0.001)

manager = LockManager([open_node(NodeSpec("memory://a"), "t:")], Rules(1, ttl=10.0, node_timeout=2.0))
"""

    done = ended(script + UNDER_GEVENT[busy] + "print('ends')\n")

    assert (done.stdout, done.stderr, done.returncode) == ("ends\n", "", 0)


DROPPED = """
import atexit, time
atexit.register(lambda: print(time.monotonic() - ended[0]))  # the last to run: the others are registered later
""" + (
    BEFORE
    + """
ended = []
def take():
    lock(f"e{time.time()}").acquire()
take()
atexit.register(lambda: ended.append(time.monotonic()))
"""
)


def test_dropped_lease_does_not_delay_the_end_of_its_process(nodes: Servers):
    """The thread that gives signs of life goes on until the lease ends; joining it would be in vain."""
    took = [float(ended(DROPPED, nodes.urls[0]).stdout.split()[-1]) for _ in range(3)]

    assert sorted(took)[-2] < 0.9, took  # join() waited for a second; a busy machine may delay one
