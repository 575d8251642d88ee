"""
Run singleton tasks under load while children, workers and a lock node are killed; return an error after a violation.

Two workers and beat run tasks of 60 keys, and bursts of calls that wait for each other in the queue of their key. Every
body records when it began and when it was last active. Afterwards the soak checks whether more bodies of one key ran at
once than may, whether an accepted call never ended, whether a slot was left behind, and for how long a key had calls
that waited, and no run.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import django

from django_redlock.testing import Server, Servers, start_servers
from django_redlock.testing.proxy import FaultProxy
from tests.services import RabbitMQ

from .nemesis import Fleet, Nemesis

NODES = 3
CALLS_PER_SECOND = 6
BURST, BETWEEN_BURSTS = (4, 16), 4.0  # calls; seconds, on average
PATIENCE = 240.0  # seconds for the workers to finish accepted calls, after the last kill
LEAST_PATIENCE = 60.0  # before a message counts as lost


def soak(minutes: float, folder: Path, nodes: Servers, backend: FaultProxy) -> list[str]:
    """Run the soak; return the violations."""
    from . import project
    from .records import Records

    book, fleet = Records(Path(os.environ["SOAK_RECORDS"])), Fleet(folder)
    nemesis = Nemesis(fleet, nodes, backend)
    start = told = time.monotonic()
    while (now := time.monotonic()) < start + 60 * minutes:
        call(book, project.work, random.randrange(project.KEYS))
        if random.random() < 1 / (CALLS_PER_SECOND * BETWEEN_BURSTS):
            key, task = random.choice([*project.BURSTS.items()])
            for _ in range(random.randint(*BURST)):
                call(book, task, key)
        nemesis.act()
        fleet.revive()
        if now - told > 60:
            told = now
            print(f"{(now - start) / 60:.0f} min: {book.figures()}, killed {dict(nemesis.killed)}", flush=True)
        time.sleep(random.expovariate(CALLS_PER_SECOND))
    nemesis.bring_back()
    backend.start()
    return judge(book, project, fleet, nemesis, nodes)


def call(book: Any, task: Any, key: int) -> None:
    """Call a task with one key, and record the answer."""
    at = time.monotonic()
    # Celery would subscribe to the result before it sends, which takes long without backend; the worker stores it.
    result = task.apply_async((key,), ignore_result=True, headers={"ignore_result": False})
    book.called(key, result.id, result.accepted, at)


def judge(book: Any, project: Any, fleet: Fleet, nemesis: Nemesis, nodes: Servers) -> list[str]:
    """Let the workers finish, print the figures, and return the violations."""
    from celery import states

    from .leftovers import Loss, Slot, left

    fleet.end_beat()
    start, loss, rest = time.monotonic(), Loss(book), max(project.LEASE, project.VISIBILITY) + 2
    revoked: set[str] = set()
    while open_calls := [task for task in book.unfinished() if task not in revoked]:
        waited = time.monotonic() - start
        if waited > PATIENCE or (waited > LEAST_PATIENCE and all(loss.gone(task) for task in open_calls)):
            break
        fleet.revive()
        revoked |= {task for task in open_calls if project.work.AsyncResult(task).state == states.REVOKED}
        time.sleep(1)
    # Calls from beat count as well: a body may still be at work, and comes back if its worker was killed.
    while time.monotonic() < min(book.last_seen() + rest, start + 2 * PATIENCE):
        time.sleep(0.5)
    slots: list[Slot] = left(nodes)
    uncovered = book.uncovered()
    named = {*open_calls, *(slot.task for slot in slots), *(task for task, *_ in uncovered)}
    proofs = {task: loss.proof(task, slots, nodes) for task in named}
    lost = {task: proof for task, proof in proofs.items() if proof}
    fleet.end()
    overlaps, repeated = book.overlaps(project.LIMITS), book.repeated()
    idle = {key: book.idle(key, lost) for key in project.BURSTS}
    # Without a stored result, the work is done again when the note of the run has ended, as the docs say.
    no_result = {
        task for task, runs in repeated.items() if all(nemesis.was_silent(seen, over) for _, seen, over in runs[:-1])
    }
    by_kills = {task for task, runs in repeated.items() if fleet.killed.issuperset(pid for pid, *_ in runs[:-1])}
    in_vain = repeated.keys() - by_kills - no_result
    missed = [slot for slot in slots if slot.missed(slots, nodes, book.last_doer(slot.task), fleet.killed)]
    remaining = [slot for slot in slots if slot not in missed and not (slot.task in lost and slot.queued)]
    unexplained = [task for task in open_calls if task not in lost]
    print(f"soak                              {book.figures()}")
    print(f"killed                            {', '.join(f'{n} {what}' for what, n in nemesis.killed.items())}")
    print(f"accepted, and skipped by a worker {len(revoked)}")
    print(f"accepted, and finished twice      {len(repeated)}; {len(no_result - by_kills)} without a stored result")
    # The slot of a message that kombu lost stays taken until queue_ttl has passed, as the docs say. If a worker dropped
    # the call that they were told of for another one, the run of that one covers them.
    in_trust = [one for one in uncovered if one[0] in lost]
    without = [one for one in uncovered if one not in in_trust and not (one[3] and one[0] in revoked)]
    print(f"accepted, and lost                {len(unexplained)}")
    print(f"duplicates that no run covers     {len(without)}")
    print(f"bodies of one key that overlapped {len(overlaps)}")
    print(f"longest time without a run        {max(idle.values()):.1f} s, while calls of the key waited")
    print(f"keys left on a node one lease after {len(remaining)}")
    print(f"the same, on too few for a slot   {len(missed)}; the process that freed it was killed first")
    if loss.possible:
        print(f"sent, and lost by kombu           {len(lost)}; {len(lost.keys() & set(open_calls))} sent by callers")
        print(f"duplicates of these               {len(in_trust)}")
        print("".join(f"  {task}: {proof}\n" for task, proof in lost.items()), end="")
    told = [f"lost: {task} ({project.work.AsyncResult(task).state})" for task in unexplained]
    told += [f"done again, though nobody was killed: {task} by {repeated[task]}" for task in in_vain]
    told += [f"not covered: key {key} at {at:.2f}, a duplicate of {task}" for task, key, at, _ in without]
    told += [f"idle for {gap:.1f} s: key {key}" for key, gap in idle.items() if gap > project.LONGEST_IDLE]
    return [*overlaps, *told, *(f"left: {slot}" for slot in remaining)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to make calls and kill processes")
    parser.add_argument("--broker", choices=("redis", "rabbitmq"), default="redis")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="redlock-soak-"))
    rabbitmq: Any = RabbitMQ() if chosen.broker == "rabbitmq" else nullcontext()
    with (
        Server() as own_broker,
        Server() as results,
        FaultProxy(results.url) as backend,
        start_servers(NODES) as nodes,
        rabbitmq as broker,
    ):
        os.environ |= {
            "DJANGO_SETTINGS_MODULE": "tests.lab.soak.settings",
            "SOAK_NODES": ",".join(nodes.urls),
            "SOAK_BROKER": broker.url if broker else own_broker.url,
            "SOAK_RESULTS": backend.url,
            "SOAK_RECORDS": str(folder / "records.sqlite3"),
        }
        django.setup()
        time.sleep(7)  # nodes that have just been started do not vote at once
        wrong = soak(chosen.minutes, folder, nodes, backend)
    print("\n".join(wrong) or "nothing went wrong")
    if wrong:
        print(f"the logs are in {folder}")
    else:
        shutil.rmtree(folder)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
