"""The exception that reports a loss in a running body, and its removal at the end of the body."""

import subprocess
import sys
import threading
from typing import Any

import pytest

from django_redlock.celery import execution as interrupt
from django_redlock.celery.execution import Interrupt, SlotLostError
from django_redlock.nodes import threads

TRACED = """
import sys, threading
from django_redlock.celery.execution import Interrupt, SlotLostError

interrupt, looping = Interrupt(), threading.Lock()

def strike():
    with looping:
        interrupt.strike()

looping.acquire()
striking = threading.Thread(target=strike)
striking.start()
try:
    looping.release()
    while True:
        pass
except SlotLostError:
    interrupt.disarm()
striking.join()
sys.settrace(lambda *event: None)
(lambda: None)()
sys.settrace(None)
print("traced")
"""


def test_what_comes_after_the_body_is_not_interrupted():
    """An exception that has not arrived at the end of the body never does."""
    late = Interrupt()
    late.disarm()

    late.strike()

    for _ in range(100_000):
        pass
    assert not late.struck


@pytest.mark.server
def test_thread_that_the_body_starts_is_not_interrupted_instead(monkeypatch):
    """Until it runs, Python 3.11 takes a new thread for the one that started it."""
    started = threading.Event()

    def strike(frame: Any, event: str, argument: Any) -> None:
        if event == "c_return" and argument is threads.start_new_thread:
            sys.setprofile(None)
            interrupt.raise_in(threading.get_ident(), SlotLostError)

    def body() -> None:
        sys.setprofile(strike)
        threads.start(started.set, "started by the body")
        for _ in range(100_000):
            pass

    monkeypatch.setattr(interrupt, "PATIENCE", 0.05)
    with pytest.raises(SlotLostError):
        body()
    assert started.wait(10)


@pytest.mark.server
def test_interpreter_is_left_as_it_was():
    """Python 3.11 keeps a mark of an exception that is withdrawn, with which tracing does not end."""
    ended = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=60, check=False)

    assert ended.stdout == "traced\n", ended.stderr
