"""
The purpose of the fence, as stories that run: ``python -m tests.lab.fencing``, or with the names of some of them.

The stories are Martin Kleppmann's figure of the client that is paused past its lease ("How to do distributed locking",
2016), and common doubts about Redlock and its tokens. Holders are processes or threads. The locks are on real servers,
or on none if the story is about their failure.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import connections

from django_redlock import Lease, fenced

from .counting import CounterTable
from .experiment import Experiment
from .holder import FAILED, Process
from .sources import lease_of

TTL = 30.0  # seconds


@dataclass
class Stage:
    """The stage of a story."""

    database: str
    other: str
    entry: dict[str, Any]
    nodes: list[str]
    say: Callable[[str], object] = print

    def holder(self) -> Process:
        """Start a process that executes commands."""
        return Process({"default": self.entry}, self.nodes)


def paused_without_a_fence(stage: Stage) -> int:
    """Return the counter after two increments, one by a holder that was stopped past its lease."""
    with stage.holder() as one, stage.holder() as two:
        one.ask("acquire", "file", TTL, 0)
        value = int(one.ask("read"))
        one.ask("shorten")
        one.stop()
        stage.say(f"1 takes the lock, reads {value}, and is stopped (SIGSTOP) for longer than its lease.")
        two.ask("acquire", "file", 30, 60)
        two.ask("write", int(two.ask("read")) + 1)
        stage.say("2 waits for the lock, gets it when the lease has ended, reads 0 and writes 1.")
        one.wake()
        one.ask("write", value + 1)
        counter = int(two.ask("read"))
        stage.say(f"1 wakes and writes 1. After two increments the counter is {counter}.")
        return counter


def paused_before_its_claim(stage: Stage) -> tuple[str, str, int]:
    """Return the stopped holder's error, why its lease ended, and the counter."""
    with stage.holder() as one, stage.holder() as two:
        one.ask("acquire", "story", TTL, 0)
        one.ask("stop_before_claiming")
        one.tell("begin")
        one.await_stop()
        stage.say("1 takes the lock, sees that its lease is valid, and is stopped (SIGSTOP) before it claims.")
        two.ask("acquire", "story", 30, 60)
        two.ask("begin")
        two.ask("write", int(two.ask("read")) + 1)
        two.ask("commit")
        stage.say("2 waits for the lock, gets it when the lease has ended, claims, reads 0, writes 1 and commits.")
        one.wake()
        refusal, reason, counter = one.answer(), one.ask("reason"), int(two.ask("read"))
        stage.say(f"1 wakes and claims, and is refused: {refusal.removeprefix(FAILED).partition(':')[0]}.")
        stage.say(f"Its lease has ended ({reason}). The counter is {counter}, and one holder learned of it.")
        return refusal, reason, counter


def is_it_realistic(stage: Stage) -> int:
    """Return how many statements the fence adds to a transaction."""

    lease = lease_of("resource")
    statements: list[str] = []

    def note(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        statements.append(sql)
        return execute(sql, *rest)

    with fenced(lease, using=stage.database):
        pass  # creates the fence
    with connections[stage.database].execute_wrapper(note):
        with fenced(lease, using=stage.database):
            CounterTable(stage.database).read()
    added = [sql for sql in statements if "redlock_fence" in sql]
    stage.say(f"The resource is a database, and the change is a table and a with block: {len(added)} more statement,")
    stage.say(f"    {added[0].split(' SET ')[0]} SET token, owner WHERE they are smaller or the same")
    return len(added)


def is_the_lock_pointless(stage: Stage) -> tuple[int, int]:
    """Return how many of the sections of four threads were cut short without a lock, and with one."""
    without = Experiment(stage.database, "pointless")
    without.run()
    with_lock = Experiment(stage.database, "pointless, locked", locked=True)
    with_lock.run()
    for what, experiment in (("a fence alone", without), ("lock and fence", with_lock)):
        cut = experiment.seen["stale"]
        stage.say(f"{what}: {cut} of {experiment.sections} sections cut short, {experiment.lost} increments lost.")
    return without.seen["stale"], with_lock.seen["stale"]


def two_delayed_writers(stage: Stage) -> tuple[int, int]:
    """Return the counter after two increments whose tokens are compared when writing, and when claiming first."""
    counter = CounterTable(stage.database)
    old, new = lease_of("writers", fencing_token=33), lease_of("writers", fencing_token=34)
    old_read, new_read = counter.read(), counter.read()
    for lease, value in ((old, old_read), (new, new_read)):
        with fenced(lease, using=stage.database):  # as a resource does that checks the tokens of its requests
            counter.write(value + 1)
    checked = counter.read()
    stage.say(f"33 and 34 read 0. Then 33 writes 1, and 34 writes 1; the tokens came in order. Counter: {checked}.")

    counter.clear()
    old, new = lease_of("writers", fencing_token=35), lease_of("writers", fencing_token=36)
    claimed = threading.Event()
    with fenced(old, using=stage.database):
        read = counter.read()
        successor = threading.Thread(target=_increment, args=(stage.database, new, claimed))
        successor.start()
        waits = not claimed.wait(0.3)
        counter.write(read + 1)
    successor.join()
    stage.say(
        f"35 claims and reads 0. 36 {'waits with its claim' if waits else 'does not wait'}. 35 writes 1 and commits;"
    )
    stage.say(f"    36 claims, reads and writes one more. Counter: {counter.read()}.")
    return checked, counter.read()


def _increment(alias: str, lease: Lease, claimed: threading.Event) -> None:

    try:
        with fenced(lease, using=alias):
            claimed.set()
            CounterTable(alias).write(CounterTable(alias).read() + 1)
    finally:
        connections.close_all()


def increments_lost(alias: str) -> Experiment:
    """Run the experiment without a fence until increments are lost: at once, unless its threads miss each other."""
    while not (experiment := Experiment(alias, "naked", fence=False)).run():
        pass
    return experiment


STORIES: dict[str, Callable[[Stage], Any]] = {
    story.__name__: story
    for story in (
        paused_without_a_fence,
        paused_before_its_claim,
        is_it_realistic,
        is_the_lock_pointless,
        two_delayed_writers,
    )
}
