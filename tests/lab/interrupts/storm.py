"""Raise exceptions from a signal handler at random moments, while locks are taken and left."""

import _thread
import random
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

from django_redlock import LockTakenError, lock

from .sweep import LATE, PATIENCE, Interrupted

NAMES = 5


def interpreter_enters_blocks_whole() -> bool:
    """
    Return whether ``with`` leaves what it entered, if a signal handler raises at that moment.

    Python 3.14 does not (https://github.com/python/cpython/issues/148874), so any lock of the process may stay taken.
    """
    mutex = threading.Lock()
    mutex.acquire()
    # Both methods are written in C, so that the handler runs at the end of the first, or else after the second.
    methods = {"__enter__": staticmethod(_thread.interrupt_main), "__exit__": staticmethod(mutex.__exit__)}
    block: Any = type("Block", (), methods)

    def strike(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGINT, strike)
    try:
        with block():
            pass
    except Interrupted:
        pass
    finally:
        signal.signal(signal.SIGINT, before)
    return not mutex.locked()


def storm(hits: int, longest: float = 0.002) -> Counter[str]:
    """
    Interrupt blocks *hits* times beside another thread that takes locks; return how often each kind of thing happened.

    Raises:
        AssertionError: A call failed otherwise than by waiting in vain, or the other thread came to a stop.
    """
    found: Counter[str] = Counter()
    armed = False
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.001):  # a thread that never waits would leave the watchdog no turn of the interpreter
            with lock("elsewhere", wait=LATE):
                found["blocks elsewhere"] += 1

    beside = threading.Thread(target=work, daemon=True)
    beside.start()

    def strike(number: int, frame: object) -> None:
        if armed:  # otherwise the signal came too late
            raise Interrupted

    def note(unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is not Interrupted:
            found[f"unraisable {unraisable.exc_value!r}"] += 1

    # A signal may strike while an object is freed, where nothing can raise. pytest's report of that takes
    # long, and must not be struck itself.
    report, sys.unraisablehook = sys.unraisablehook, note
    before = signal.signal(signal.SIGALRM, strike)
    while found["interrupted"] < hits:
        name = f"n{found['blocks'] % NAMES}"
        found["blocks"] += 1
        try:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, longest))
                with lock(name, wait=LATE):
                    time.sleep(0)
            finally:
                armed = False
        except Interrupted:
            found["interrupted"] += 1
        except LockTakenError:
            found["waited in vain"] += 1
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)
    sys.unraisablehook = report
    for number in range(NAMES):
        with lock(f"n{number}", wait=LATE) as lease:
            assert lease.valid()
    until, soon = time.monotonic() + PATIENCE, found["blocks elsewhere"] + 3
    while found["blocks elsewhere"] < soon:
        assert beside.is_alive()
        assert time.monotonic() < until
        time.sleep(0.01)
    over.set()
    beside.join(PATIENCE)
    return found
