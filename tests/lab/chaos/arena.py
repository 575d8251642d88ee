"""The arena: servers behind proxies, workers, and the database that they share."""

import json
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from subprocess import PIPE, Popen
from typing import Any, Self

from django_redlock.testing import FaultProxy, Server
from django_redlock.testing.servers import spawn
from tests import clusters
from tests.etcd import Cluster, Member, cluster
from tests.lab.tables import heads, row
from tests.zookeeper import Ensemble, Zoo, ensemble

from .clock import Clock, build
from .counter import KINDS, counted
from .history import History
from .nemesis import SERVED, Profile, rage

KEEPING = ("--appendonly", "yes", "--appendfsync", "always")
WORKERS = 4
ELECTION = 30.0  # seconds, with much to spare, in which a cluster has another leader or master, and votes again
WARM_UP = 3.0  # seconds beyond a ttl until nodes that have just started may vote; their uptime has whole seconds
GRACE = 60.0  # seconds that a worker may take to end: it may be waiting for a lock and for a row


@dataclass(eq=False)
class WorkerProcess:
    """One worker, as the arena sees it."""

    number: int
    process: Popen[bytes]
    diary: Path
    killed: float = float("inf")

    def freeze(self) -> None:
        os.kill(self.process.pid, SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, SIGCONT)

    def kill(self) -> None:
        """End the worker; its holds end now at the latest."""
        os.kill(self.process.pid, SIGKILL)
        self.process.wait()
        self.killed = time.monotonic()


@dataclass
class Result:
    """The result of a run."""

    profile: Profile
    nodes: int
    seconds: float
    history: History
    faults: int
    counted: dict[str, tuple[int, int]]

    @property
    def lost(self) -> dict[str, int]:
        """Increments that were committed and are missing from the counter, or acknowledged and never committed."""
        return {
            kind: done - value + max(0, self.history.done[kind] - done) for kind, (value, done) in self.counted.items()
        }

    @property
    def failures(self) -> list[str]:
        """The violations of the run."""
        found = [f"{self.lost['fenced']} increments behind the fence were lost"] if self.lost["fenced"] else []
        found += [] if self.history.holds else ["no worker ever had the lock"]
        found += ["nothing ever failed"] if self.profile.faults and not self.faults else []
        if not self.profile.tolerated:
            found += [f"overlap: {before} and {after}" for before, after in self.history.overlaps()]
            found += [f"token {token} is not in order" for token in self.history.wrong_tokens()]
        if self.profile.store:
            late = [after for after in self.history.freed() if after > self.profile.ttl + ELECTION]
            found += [f"the lock of a dead holder was free only {after:.1f} s after its deadline" for after in late]
        return found

    def line(self) -> str:
        """Return the run's line of the table."""
        lost = [f"{self.lost[kind]:,} of {self.counted[kind][1]:,}" for kind in ("plain", "fenced")]
        history = self.history
        numbers = (history.failed, history.lost, len(history.overlaps()), len(history.wrong_tokens()), history.stale)
        cells = [self.profile.name, self.nodes, f"{self.seconds:.0f} s", f"{self.faults:,}", f"{len(history.holds):,}"]
        return row([*cells, *numbers, *lost])


COLUMNS = ("profile", "nodes", "time", "faults", "acquisitions", "in vain", "leases lost", "overlaps", "token errors")
COLUMNS += ("fenced out", "lost, no fence", "lost, fenced")
HEADS = heads(COLUMNS)


class Arena:
    """Servers, proxies and workers; in a ``with`` block."""

    def __init__(self, folder: Path, profile: Profile, database: dict[str, Any], nodes: int = 3) -> None:
        self.profile = profile
        self.clocks: list[Clock] = []
        if profile.clocks:
            library = build(folder)
            self.clocks = [Clock(library, folder / f"clock {number}") for number in range(nodes)]
        environments = [clock.environment for clock in self.clocks] or [{}] * nodes
        # Nodes that keep their data are called durable: every write is on disk before the reply.
        args = KEEPING if profile.durable else ()
        self.servers = [] if profile.store else [Server(args=args, environment=each) for each in environments]
        self.cluster: Cluster | Ensemble | clusters.Cluster | None = None
        self.proxies: list[FaultProxy] = []
        self.workers: list[WorkerProcess] = []
        self.gone: list[WorkerProcess] = []
        self._folder = folder
        self._database = database
        self._ends = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack as stack:
            if self.profile.store == "etcd":
                self.cluster = stack.enter_context(cluster())
            if self.profile.store == "zookeeper":
                self.cluster = stack.enter_context(ensemble())
            if self.profile.store == "cluster":
                self.cluster = stack.enter_context(clusters.cluster(3, replicas=True, proxied=True))
                self.proxies.extend(self.cluster.proxies)
            for server in self.servers or self.members:
                if isinstance(server, Server):
                    stack.enter_context(server)
                self.proxies.append(stack.enter_context(FaultProxy(server.url)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.kill()
        self._stack.close()

    def run(self, seconds: float) -> Result:
        """Let the workers work and the nemesis inject faults for the given time, and judge the result."""
        time.sleep(self.profile.ttl + WARM_UP)
        self._ends = time.monotonic() + seconds
        for _ in range(WORKERS):
            self.start_worker()
        faults = rage(self, self.profile, seconds)
        for worker in self.workers:
            worker.process.wait(GRACE)
        history = History()
        for worker in [*self.gone, *self.workers]:
            if worker.killed == float("inf") and worker.process.returncode:
                raise RuntimeError(f"Worker {worker.number} failed; see its error above.")
            history.read(worker.diary, worker.killed)
        found = {kind: counted(kind) for kind in KINDS}
        return Result(self.profile, len(self.urls), seconds, history, faults, found)

    @property
    def urls(self) -> list[str]:
        """The nodes, as the workers reach them."""
        urls = [proxy.url for proxy in self.proxies]
        if isinstance(self.cluster, clusters.Cluster):
            return [self.cluster.url]
        scheme = f"{self.profile.store}://"
        return [scheme + ",".join(url.removeprefix(scheme) for url in urls)] if self.cluster else urls

    # What the nemesis acts on

    @property
    def members(self) -> list[Member | Zoo]:
        """The members of a cluster of etcd or ZooKeeper."""
        return [*self.cluster.members] if isinstance(self.cluster, Cluster | Ensemble) else []

    def rejoin(self, member: Member | Zoo) -> None:
        """Have a wiped member join the cluster again."""
        if isinstance(self.cluster, Cluster) and isinstance(member, Member):
            self.cluster.replace(member)
        else:
            member.start()  # the others give it what they have before it answers

    def any_proxy(self) -> FaultProxy:
        if isinstance(self.cluster, clusters.Cluster) and random.random() < 0.5:
            return self.proxies[self.cluster.owner(SERVED)]
        return random.choice(self.proxies)

    def replace(self, worker: WorkerProcess) -> None:
        """Kill a worker, and start another."""
        worker.kill()
        self.workers.remove(worker)
        self.gone.append(worker)
        self.start_worker()

    def start_worker(self) -> WorkerProcess:
        number = len(self.workers) + len(self.gone)
        ttl = self.profile.ttl
        rules: dict[str, Any] = {"ttl": ttl, "max_ttl": ttl, "node_timeout": self.profile.node_timeout}
        if self.profile.restart_guard is not None:
            rules["restart_guard"] = self.profile.restart_guard
        if self.profile.durable:
            rules["durable"] = [f"node {place}" for place in range(len(self.servers))]
        diary = self._folder / f"diary {number}"
        diary.touch()
        order = {
            "urls": self.urls,
            "rules": rules,
            "slow": self.profile.slow,
            "diary": str(diary),
            "database": self._database,
            "seed": random.random(),
            "seconds": max(0.1, self._ends - time.monotonic()),
        }
        command = [sys.executable, "-m", "tests.lab.chaos.worker", json.dumps(order)]
        environment = os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings"}
        process = spawn(command, stdin=subprocess.DEVNULL, stdout=PIPE, env=environment)
        assert process.stdout is not None
        with process.stdout as ready:  # ready, or ended
            ready.readline()
        worker = WorkerProcess(number, process, diary)
        self.workers.append(worker)
        return worker
