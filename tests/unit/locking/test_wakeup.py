"""
What wakes a thread that polls.
"""

import select
import threading

from django_redlock.engine.wakeup import WakeUp


def test_who_polls_is_woken():
    """A call ends the poll of another thread, also one that came before it; taken back, it wakes nobody."""
    wakeup, poll = WakeUp(), select.poll()
    poll.register(wakeup, select.POLLIN)
    thread = threading.Thread(target=wakeup.ring)
    thread.start()

    assert poll.poll(30_000)
    thread.join()
    wakeup.hush()
    assert not poll.poll(0)


def test_nobody_is_left_to_be_woken():
    """Closed, it takes calls and does nothing; forgotten, it closes itself, and no warning tells of open sockets."""
    wakeup = WakeUp()
    wakeup.close()

    wakeup.ring()
    wakeup.hush()
    WakeUp()
