"""
The wake-up of a thread that polls.
"""

import select
import threading

from django_redlock.engine.connections import WakeUp


def test_polling_thread_is_woken():
    """A call ends the poll of another thread, also one that came before it; a cancelled call wakes nobody."""
    wakeup, poll = WakeUp(), select.poll()
    poll.register(wakeup, select.POLLIN)
    thread = threading.Thread(target=wakeup.ring)
    thread.start()

    assert poll.poll(30_000)
    thread.join()
    wakeup.hush()
    assert not poll.poll(0)


def test_closed_wake_up_wakes_nobody():
    """Closed, it accepts calls and does nothing; forgotten, it closes itself, and no warning reports open sockets."""
    wakeup = WakeUp()
    wakeup.close()

    wakeup.ring()
    wakeup.hush()
    WakeUp()
