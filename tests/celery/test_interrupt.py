"""What raises the loss in a running body, and is taken back when the body has ended."""

import subprocess
import sys
import threading

import pytest

from django_redlock.celery.interrupt import Interrupt, SlotLostError

TRACED = """
import sys, threading
from django_redlock.celery.interrupt import Interrupt, SlotLostError

interrupt = Interrupt()
try:
    striking = threading.Thread(target=interrupt.strike)
    striking.start()
    striking.join()
    while True:
        pass
except SlotLostError:
    interrupt.disarm()
sys.settrace(lambda *event: None)
(lambda: None)()
sys.settrace(None)
print("traced")
"""


def test_body_is_interrupted_and_what_comes_after_it_is_not():
    """C85: the exception arrives in the body; one that has not arrived at its end never does."""
    interrupt = Interrupt()
    striking = threading.Thread(target=interrupt.strike)

    def body() -> None:
        striking.start()
        while True:
            pass

    with pytest.raises(SlotLostError):
        body()
    interrupt.disarm()

    striking.join()
    late = Interrupt()
    late.disarm()
    late.strike()
    for _ in range(100_000):
        pass
    assert not late.struck


def test_interpreter_is_left_as_it_was():
    """C85: Python 3.11 keeps a mark of an exception that is withdrawn, with which tracing does not end."""
    ended = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=60, check=False)

    assert ended.stdout == "traced\n", ended.stderr
