"""Run the soak and print its figures; ends with an error if something that must not happen has happened."""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from glob import glob
from pathlib import Path
from typing import Any

from django_redlock.testing import Server, Servers, start_servers
from django_redlock.testing.processes import spawn

from ..services import RabbitMQ

NODES = 3
REDIS = "redis://"
CALLS_PER_SECOND = 6
NODE_REST = 40.0  # seconds between two kills of a node: the first must be voting again
PATIENCE = 240.0  # seconds for the workers to finish what was accepted, once nothing is killed any more


class Fleet:
    """The workers and beat, which are started again when they were killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = iter(range(1_000_000))
        self.beat = self._celery("beat", f"--schedule={folder / 'beat'}", "--loglevel=WARNING")
        self.workers = [self._worker(), self._worker()]

    def _celery(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "celery", "-A", "tests.soak.project", *arguments]
        with (self._folder / "log").open("ab") as log:
            return spawn(
                command,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=log,
                stderr=log,
            )

    def _worker(self) -> subprocess.Popen[bytes]:
        options = ["--pool=prefork", "--concurrency=3", "--loglevel=INFO", "--without-gossip", "--without-mingle"]
        return self._celery("worker", *options, f"--hostname=soak{next(self._numbers)}@localhost")

    def kill_worker(self) -> None:
        """Kill a worker, whose children die with it, and start another."""
        place = random.randrange(len(self.workers))
        self.workers[place].kill()
        self.workers[place].wait()
        self.workers[place] = self._worker()

    def kill_child(self) -> bool:
        """Kill a child of a worker; returns whether there was one."""
        worker = random.choice(self.workers).pid
        children = [
            int(pid) for path in glob(f"/proc/{worker}/task/*/children") for pid in Path(path).read_text().split()
        ]
        if not children:
            return False
        os.kill(random.choice(children), signal.SIGKILL)
        return True

    def revive(self) -> None:
        """Start again what has ended by itself."""
        for place, worker in enumerate(self.workers):
            if worker.poll() is not None:
                self.workers[place] = self._worker()

    def end(self, *processes: subprocess.Popen[bytes]) -> None:
        """End processes, all if none are named."""
        for process in processes or (self.beat, *self.workers):
            process.kill()
            process.wait()


def soak(minutes: float, folder: Path, nodes: Servers) -> list[str]:
    """Run the soak; returns what went wrong."""
    from . import project
    from .records import Records

    book, fleet, random_ = Records(Path(os.environ["SOAK_RECORDS"])), Fleet(folder), random.Random()
    killed: Counter[str] = Counter()
    start = time.monotonic()
    end, next_kill, node_kill, down = start + 60 * minutes, start + 15, start + 20, None
    told = start
    while (now := time.monotonic()) < end:
        call(book, project, random_.randrange(project.KEYS))
        if down is not None and now > node_kill + 3:
            nodes[down].start()
            node_kill, down = now + NODE_REST, None
        if now > next_kill:
            next_kill = now + random_.uniform(3, 10)
            if down is None and now > node_kill and random_.random() < 0.5:
                down, node_kill = random_.randrange(NODES), now
                nodes[down].kill()
                killed["nodes"] += 1
            elif random_.random() < 0.3:
                fleet.kill_worker()
                killed["workers"] += 1
            else:
                killed["children"] += fleet.kill_child()
        fleet.revive()
        if now - told > 60:
            told = now
            print(f"{(now - start) / 60:.0f} min: {book.figures()}, killed {dict(killed)}", flush=True)
        time.sleep(random_.expovariate(CALLS_PER_SECOND))
    if down is not None:
        nodes[down].start()
    return judge(book, project, fleet, killed, minutes, folder)


def call(book: Any, project: Any, key: int) -> None:
    """Call the task of one key, and record the answer."""
    result = project.work.delay(key)
    book.called(key, result.id, result.accepted)


def judge(book: Any, project: Any, fleet: Fleet, killed: Counter[str], minutes: float, folder: Path) -> list[str]:
    """Let the workers finish, print what happened, and return what went wrong."""
    from celery import states

    fleet.end(fleet.beat)
    deadline = time.monotonic() + PATIENCE
    revoked: set[str] = set()
    while (open_calls := [task for task in book.unfinished() if task not in revoked]) and time.monotonic() < deadline:
        fleet.revive()
        revoked |= {task for task in open_calls if project.work.AsyncResult(task).state == states.REVOKED}
        time.sleep(1)
    time.sleep(project.LEASE + 2)
    slots = held()
    fleet.end()
    overlaps, figures = book.overlaps(), book.figures()
    # kombu takes a message out of Redis before it notes that it has done so; a worker that is killed between the two,
    # or whose connection is still open when it is dead, takes the message along. No task of Celery's is safe from that.
    log = (folder / "log").read_text(errors="replace")
    undelivered = [task for task in open_calls if task not in log] if REDIS in os.environ["SOAK_BROKER"] else []
    open_calls = [task for task in open_calls if task not in undelivered]
    print(
        f"soak of {minutes:g} minutes: two workers, beat, {project.KEYS} keys, lease {project.LEASE:g} s, {NODES} nodes"
    )
    dead = ", ".join(f"{n} {what}" for what, n in sorted(killed.items())) or "nothing"
    print(f"killed                            {dead}")
    print(f"calls                             {figures.calls}, of which {figures.accepted} were accepted")
    print(
        f"bodies                            {figures.begun} begun, {figures.finished} finished, of {figures.keys} keys"
    )
    print(f"accepted, and skipped by a worker {len(revoked)}")
    print(f"accepted, and finished twice      {book.twice()}")
    print(f"accepted, and lost                {len(open_calls)}")
    if REDIS in os.environ["SOAK_BROKER"]:
        print(f"accepted, and no worker got it    {len(undelivered)}, lost in kombu's Redis transport")
    print(f"bodies of one key that overlapped {len(overlaps)}")
    print(f"slots left one lease after        {len(slots)}")
    lost = [f"lost: {task} ({project.work.AsyncResult(task).state})" for task in open_calls]
    return [*overlaps, *lost, *(f"left: {slot}" for slot in slots)]


def held() -> list[str]:
    """Return the slots that a quorum of nodes has; notes and the signs of life of processes are none."""
    from django_redlock import locks
    from django_redlock.celery.slots import peek

    replies = locks["default"].survey(count=5000)
    slugs = {row.slug for reply in replies.values() for row in reply.rows if row.value}
    names = {slug[1:-1] for slug in slugs if slug.startswith("{task:") and slug.endswith("}")}
    return sorted(name for name in names if peek("default", name).value)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long calls are made and processes killed")
    parser.add_argument("--broker", choices=("redis", "rabbitmq"), default="redis")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="redlock-soak-"))
    rabbitmq: Any = RabbitMQ() if chosen.broker == "rabbitmq" else nullcontext()
    with Server() as results, start_servers(NODES) as nodes, rabbitmq as broker:
        os.environ |= {
            "DJANGO_SETTINGS_MODULE": "tests.soak.settings",
            "SOAK_BROKER": broker.url if broker else results.url,
            "SOAK_RESULTS": results.url,
            "SOAK_NODES": ",".join(nodes.urls),
            "SOAK_RECORDS": str(folder / "records.sqlite3"),
        }
        import django

        django.setup()
        time.sleep(7)  # nodes that have just been started do not vote at once
        wrong = soak(chosen.minutes, folder, nodes)
    print("\n".join(wrong) or "nothing went wrong")
    if wrong:
        print(f"the logs are in {folder}")
    else:
        shutil.rmtree(folder)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
