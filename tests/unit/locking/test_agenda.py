"""Which leases the watchdog extends together, and in which order."""

import asyncio
import math
from unittest.mock import Mock

from django_redlock.core.rules import Rules
from django_redlock.engine.presence import Presence, this_process
from django_redlock.engine.watchdog import Agenda, AsyncWatchdog, Watchdog
from django_redlock.runtime.clock import steady


class Lease:
    renewed = True
    keeper = None

    def __init__(self, due: float, slack: float = 0.0) -> None:
        self.when, self.slack = due, slack

    @property
    def hold(self) -> "Lease":
        return self

    def due(self) -> float:
        return self.when

    def valid(self) -> bool:
        return True


def agenda(*leases: Lease) -> Agenda:
    made = Agenda()
    for lease in leases:
        made.add(lease)
    return made


def test_ended_and_dropped_leases_do_not_accumulate():
    """The agenda keeps no lease alive, and no memory of many that were soon released, or that moved often."""
    todo = agenda(kept := Lease(50.0), moved := Lease(41.0))
    for turn in range(1000):
        lease = Lease(40.0)
        todo.add(lease)
        todo.drop(lease)
        moved.when = 41.0 + turn / 1000
        todo.add(moved)
    todo.add(Lease(45.0))  # collected at once

    assert len(todo) == 2
    assert len(todo._leases) < 100
    assert todo.take(60.0) == [moved, kept]
    assert todo.take(60.0) == []  # they are being tended


def test_lease_that_was_dropped_while_it_was_tended_is_not_put_back():
    """A slot that was handed over is not extended, whichever thread was about to."""
    todo = agenda(lease := Lease(10.0))
    taken = todo.take(10.0)
    todo.drop(lease)

    todo.put_back(taken[0])

    assert (len(todo), todo.next()) == (0, math.inf)


class Alias:
    """Has one lease."""

    def __init__(self, name: str, seconds: float = 0.0, ttl: float = 10.0) -> None:
        self.name, self.seconds = name, seconds
        self.lease = Lease(10.0, slack=ttl / 12)
        self.lease.keeper = self


def test_aliases_whose_nodes_stay_silent_take_turns_behind_the_others():
    """Each of them blocks the thread for a node timeout, in which the shorter leases of others may become due."""
    tried: list[str] = []
    now = 100.0

    class Blocking(Alias):
        def extend(self, leases: list[Lease]) -> None:
            nonlocal now
            tried.append(self.name)
            now += self.seconds

    chore = Blocking("e", 1.0, ttl=0.0)
    aliases = [chore, Blocking("a", 1.0), Blocking("b", 1.0), Blocking("c", 1.0), Blocking("d", ttl=3.0)]
    watchdog = Watchdog(lambda: now)

    def turn() -> str:
        tried.clear()
        watchdog._tend([alias.lease for alias in aliases])
        return "".join(tried)

    assert [turn() for _ in range(7)] == ["da", "db", "dc", "de", "da", "db", "dc"]
    aliases[2].seconds = 0.0
    assert [turn() for _ in range(4)] == ["de", "da", "dbc", "dbe"]


async def test_event_loop_extends_the_leases_of_all_aliases_at_once():
    """None of them waits for the silent nodes of another."""
    together = asyncio.Barrier(3)

    class Waiting(Alias):
        async def aextend(self, leases: list[Lease]) -> None:
            await together.wait()

    aliases = [Waiting(name) for name in "abc"]

    await asyncio.wait_for(AsyncWatchdog()._tend([alias.lease for alias in aliases]), 60)


def test_signs_of_life_continue_when_a_lock_is_taken_while_they_stop():
    """A process that takes a lock while its signs of life stop gives another one, or it would count as dead."""
    watched: list[object] = []

    class Dog:
        def watch(self, lease: object) -> None:
            watched.append(lease)

        def tends(self, keeper: object) -> bool:
            if held:
                return True
            held.append("a lock")  # taken by another thread, right after the check that found none
            presence.join()
            return False

    held = ["a lock"]
    presence = Presence(None, Rules(1), Mock(), Mock(), this_process(since=0.0), Dog(), steady)
    presence.join()
    due = presence.due()
    held.clear()

    assert presence.valid()
    assert presence.due() == due
    assert watched == [presence]
