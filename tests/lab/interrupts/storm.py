"""Signals at random moments."""

import faulthandler
import random
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from .sweep import LATEST, TTL, eventually
from .trap import Interrupted


class Storm:
    """
    Signals at random moments, while another thread takes locks and a third lease must be renewed.

    Args:
        manager: The manager of the locks.
        seed: The seed of the moments.
    """

    def __init__(self, manager: Any, seed: int = 1) -> None:
        self.hits = self.taken = 0
        self._manager = manager
        self._lock = manager.lock("swept", wait=10 * TTL, ttl=TTL)
        self._random = random.Random(seed)

    def run(self, hits: int) -> None:
        """
        Interrupt with the given number of signals; fail if anything hangs, or is not renewed or released, afterwards.
        """
        faulthandler.dump_traceback_later(4 * LATEST, exit=True)
        kept = self._manager.lock("kept", ttl=10.0).acquire()
        threading.Thread(target=self._take_others, daemon=True).start()
        before = signal.signal(signal.SIGALRM, self._hit)
        while self.hits < hits:
            with suppress(Interrupted):
                hit = self.hits
                signal.setitimer(signal.ITIMER_REAL, self._random.uniform(0.00002, 0.003))
                while self.hits == hit:  # Python may swallow the exception, in a __del__
                    with self._lock as lease:
                        lease.extend()
        signal.signal(signal.SIGALRM, before)
        taken, extensions = self.taken, kept.extensions
        with self._lock as lease:
            assert lease.valid()
        eventually(lambda: self.taken > taken + 3)
        eventually(lambda: kept.extensions > extensions)
        assert kept.release() == "released"
        print("survived", self.hits)
        faulthandler.cancel_dump_traceback_later()

    def _hit(self, number: int, frame: FrameType | None) -> None:
        self.hits += 1
        raise Interrupted

    def _take_others(self) -> None:
        while True:
            self._manager.lock("other", wait=10 * TTL).acquire().release()
            self.taken += 1
