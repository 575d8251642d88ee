"""
Threads that increment a counter by reading and writing, with no lock at all.

Their tokens grow, but arrive late, and a fifth of them is given out twice. So the fence has to decide about every
claim.
"""

import itertools
import random
import threading
import time
from collections import Counter
from contextlib import nullcontext

from django.db import DatabaseError, connections

from django_redlock import Lease, StaleTokenError, fenced
from django_redlock.fencing import is_conflict

from .counting import CounterTable
from .sources import lease_of

THREADS = 4
SECTIONS = 15  # per thread
STEPS = 3  # transactions per section


class BrokenSource:
    """Gives out growing tokens, a fifth of them twice, or none."""

    def __init__(self, twice: float) -> None:
        self._twice = twice
        self._mutex = threading.Lock()
        self._tokens = itertools.count(1000)
        self._last = next(self._tokens)

    def token(self) -> int:
        with self._mutex:
            if random.random() >= self._twice:
                self._last = next(self._tokens)
            return self._last


class Experiment:
    """Threads that increment one counter, each section with a lease that excludes nobody."""

    def __init__(self, alias: str, name: str, *, fence: bool = True, retries: int = 0, locked: bool = False) -> None:
        self.alias = alias
        self.name = name
        self.fence = fence
        self.retries = retries
        self.turn = threading.Lock() if locked else nullcontext()
        self.counter = CounterTable(alias)
        self.source = BrokenSource(0 if locked else 0.2)
        self.seen: Counter[str] = Counter()
        self.surprises: list[BaseException] = []
        self.lost = 0  # committed increments that are missing from the counter

    def run(self) -> int:
        """Run all threads to the end; return how many increments are lost."""
        before = self.counter.read()
        threads = [threading.Thread(target=self._work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
        assert not any(thread.is_alive() for thread in threads)
        assert self.surprises == [], self.surprises
        self.lost = self.seen["committed"] - (self.counter.read() - before)
        return self.lost

    def _work(self) -> None:
        try:
            for _ in range(SECTIONS):
                with self.turn:
                    self._section()
        except BaseException as error:
            self.surprises.append(error)
        finally:
            connections.close_all()

    def _section(self) -> None:
        token = self.source.token()
        time.sleep(random.uniform(0, 0.01))  # delivered late
        lease = lease_of(self.name, fencing_token=token)
        for _ in range(STEPS):
            try:
                self._increment(lease)
                self.seen["committed"] += 1
            except StaleTokenError:
                self.seen["stale"] += 1
                return
            except DatabaseError as error:
                if not is_conflict(error):
                    raise
                self.seen["conflicts"] += 1

    def _increment(self, lease: Lease) -> None:
        def increment() -> None:
            value = self.counter.read()
            time.sleep(random.uniform(0, 0.003))
            self.counter.write(value + 1, lease.fencing_token, lease.hold.owner())

        if self.fence:
            fenced(lease, using=self.alias, retries=self.retries).run(increment)
        else:
            increment()
