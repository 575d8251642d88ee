"""The processes of the soak, and the nemesis that kills them."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from django_redlock.testing import Servers
from django_redlock.testing.proxy import FaultProxy
from django_redlock.testing.servers import spawn
from tests.services import children

APP = "tests.lab.soak.project"
NODE_REST = 40.0  # seconds between two kills of a node: the first must be voting again
BACKEND_AWAY = (2.0, 12.0)  # seconds
MOMENT = 2.0  # seconds for which clients miss the backend before they notice, and after it is back
DOWN, FROZEN = 3.0, (0.3, 3.0)  # seconds for which a node is away
PEACE = 6.0  # seconds after a freeze without another fault, so that clients that missed the node continue


class Fleet:
    """The workers and beat, which are started again after they were killed."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._numbers = iter(range(1_000_000))
        self.killed: set[int] = set()  # process ids of children that were killed, with their worker or alone
        self.beat = self._celery("beat", f"--schedule={folder / 'beat'}", "--loglevel=WARNING")
        self.workers = [self._worker(), self._worker()]

    def _celery(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a program of Celery, which ends with this process."""
        command = [sys.executable, "-m", "celery", "-A", APP, *arguments]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self._log.open("ab") as output:
            return spawn(command, env=environment, stdout=output, stderr=output)

    def _worker(self) -> subprocess.Popen[bytes]:
        options = [
            "--without-gossip",
            "--without-mingle",
            "--pool=prefork",
            "--concurrency=3",
            "--loglevel=INFO",
            f"--hostname=soak{next(self._numbers)}@localhost",
        ]
        return self._celery("worker", *options)

    def kill_worker(self) -> None:
        """Kill a worker, whose children die with it, and start another."""
        place = random.randrange(len(self.workers))
        self.killed.update(children(self.workers[place].pid))
        self.workers[place].kill()
        self.workers[place].wait()
        self.workers[place] = self._worker()

    def stop_worker(self) -> None:
        """Stop a worker, which may finish what runs, or not; another one is started when it has ended."""
        chosen = random.choice(self.workers)
        how = random.choice([signal.SIGTERM, signal.SIGQUIT])
        if how == signal.SIGQUIT:
            self.killed.update(children(chosen.pid))
        chosen.send_signal(how)

    def kill_child(self) -> bool:
        """Kill a child of a worker; return whether there was one."""
        alive = children(random.choice(self.workers).pid)
        if not alive:
            return False
        child = random.choice(alive)
        self.killed.add(child)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        return True

    def revive(self) -> None:
        """Restart processes that have ended by themselves."""
        for place, running in enumerate(self.workers):
            if running.poll() is not None:
                self.workers[place] = self._worker()

    def end_beat(self) -> None:
        """End beat properly: otherwise nobody would send the message of a slot that it has just taken."""
        self.beat.terminate()
        self.beat.wait()

    def end(self) -> None:
        """End all processes."""
        for process in (self.beat, *self.workers):
            process.kill()
            process.wait()


class Nemesis:
    """Kills children, workers and one node at a time; sometimes one only stops, or the result backend is away."""

    def __init__(self, fleet: Fleet, nodes: Servers, backend: FaultProxy) -> None:
        self._fleet = fleet
        self._nodes = nodes
        self._backend = backend
        self._backend_until = 0.0  # until when the backend is away
        self._silences: list[tuple[float, float]] = []  # when it was
        self._next_backend = time.monotonic() + 25
        self._next = time.monotonic() + 15
        self._next_node = time.monotonic() + 20
        self._away: tuple[int, float] | None = None
        self.killed: Counter[str] = Counter()

    def act(self) -> None:
        """Run the actions that are due."""
        now = time.monotonic()
        if self._backend_until and now > self._backend_until:
            self._backend.start()
            self._backend_until, self._next_backend = 0.0, now + random.uniform(15, 60)
        if now > self._next_backend and not self._backend_until:
            self._backend.stop()
            self._backend_until = now + random.uniform(*BACKEND_AWAY)
            self._silences.append((now, self._backend_until))
            self.killed["result backends for a while"] += 1
        if self._away and now > self._away[1]:
            self.bring_back()
        if self._away or now < self._next:
            return
        self._next = now + random.uniform(3, 10)
        if now > self._next_node and random.random() < 0.5:
            self._strike_node(now)
        elif (chance := random.random()) < 0.3:
            self._fleet.kill_worker()
            self.killed["workers"] += 1
        elif chance < 0.5:
            self._fleet.stop_worker()
            self.killed["workers that could end in order"] += 1
        else:
            self.killed["children"] += self._fleet.kill_child()

    def was_silent(self, start: float, end: float) -> bool:
        """Return whether no result could be stored at some moment between two, or just before or after."""
        return any(away - MOMENT < end and start < back + MOMENT for away, back in self._silences)

    def _strike_node(self, now: float) -> None:
        node = random.randrange(len(self._nodes))
        if random.random() < 0.5:
            self._nodes[node].kill()
            self.killed["nodes"] += 1
            self._away, self._next_node = (node, now + DOWN), now + NODE_REST
        else:
            self._nodes[node].freeze()
            self.killed["nodes for a while"] += 1
            until = now + random.uniform(*FROZEN)
            self._away, self._next = (node, until), until + PEACE

    def bring_back(self) -> None:
        """Bring the absent node back."""
        if self._away:
            self._nodes[self._away[0]].start()
            self._nodes[self._away[0]].thaw()
            self._away = None
