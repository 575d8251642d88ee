"""
Each assumption, broken on purpose: the guarantee that needs it fails, and an oracle reports it.

The letters are those of ``docs/trust/guarantees.md``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.machine.mutation import Kill, hunt

from .database import Row
from .mutants import READ_BEFORE_CLAIM
from .profiles import CALM, LOSS, PAUSE, TTL, Profile
from .scenarios import Scenario, amnesia, break_links, scenario, visit, with_clocks
from .schedule import Client, Schedule

ENOUGH = 500  # schedules after which an assumption counts as not needed


class Assumption(NamedTuple):
    """One assumption, and how it is broken."""

    name: str
    oracle: str  # the one that must object
    haunts: tuple[Scenario]
    change: Callable[[], Any] = nullcontext  # breaks something in the simulator for as long as its context lasts


def need(assumption: Assumption) -> Kill:
    """Run schedules until the expected oracle objects."""
    return hunt(
        assumption,
        lambda scenario, seed: next((what for oracle, what in scenario(seed) if oracle == assumption.oracle), None),
        ENOUGH,
    )


@scenario()
def most_clocks_step(schedule: Schedule, holder: Client, cold: Client) -> None:
    """
    Two of three nodes' clocks step forward together, and a client comes that has not heard from any of them before.
    """
    visit(holder)
    holder.acquire(("a",), 0.0)
    for machine in schedule.machines[:2]:
        machine.set_clock(60.0)
    schedule.world.sleep(0.1)
    cold.spawn(cold.acquire, ("a",), 0.0)


@scenario()
def step_is_undone_unseen(schedule: Schedule, holder: Client, other: Client, third: Client) -> None:
    """One node's clock steps forward and back again before a client that knows the node hears from it."""
    other.spawn(visit, other)
    visit(holder)
    schedule.world.sleep(0.1)
    break_links(holder, "deaf", {2})
    holder.acquire(("a",), 0.0)
    schedule.machines[0].set_clock(60.0)
    third.spawn(visit, third)
    schedule.world.sleep(0.1)
    schedule.machines[0].set_clock(-60.0)
    other.spawn(other.acquire, ("a",), 0.0)


@scenario(seconds=5.0, restart_guard=False)
def one_of_three_forgets(schedule: Schedule, first: Client, second: Client) -> None:
    """The only node that two quorums share forgets the token of the first, and the clock of the second is behind."""
    schedule.oracles.guarded = False
    second.wall.step(-2.0)
    second.spawn(visit, second)
    visit(first)
    schedule.world.sleep(0.1)
    break_links(first, "deaf", {2})
    first.release(first.acquire(("a",), 0.0))
    schedule.machines[1].crash(forget=True)
    schedule.machines[1].start()
    break_links(second, "deaf", {0})
    second.spawn(second.acquire, ("a",), 2.0)


@scenario(seconds=10.0)
def tokens_are_forgotten(schedule: Schedule, first: Client, second: Client) -> None:
    """All nodes forget the last token, and much later a client comes whose clock is further behind than that."""
    second.wall.step(-60.0)
    first.release(first.acquire(("a",), 0.0))
    for machine in schedule.machines:
        machine.crash(forget=True)
        machine.start()
    schedule.world.sleep(5 * TTL)
    second.spawn(second.acquire, ("a",), None)


def lose_time(client: Client) -> None:
    """Let the steady clocks of some clients lose a fifth of the time."""
    client.steady.rate = client.world.random.choice((0.8, 1.0))


def rows_stay_unlocked() -> Any:
    """A claim does not lock its row until the transaction ends."""
    return patch.object(Row, "lock", lambda row, session: True)


def few_secrets() -> Any:
    """All clients draw from the same four secrets."""
    return patch.object(Client, "fresh_secret", lambda self: f"{self.world.random.randrange(4):032x}")


STALLED = replace(PAUSE, slow=0.1)


def schedules_of(profile: Profile) -> Scenario:
    return lambda seed: Schedule(profile, seed).run().violations


ASSUMPTIONS = [
    Assumption("A1: one node of three forgets its tokens, and clocks are off", "token", (one_of_three_forgets,)),
    Assumption("A1': nodes that forgot the locks vote at once", "overlap", (amnesia(3, 2, 2),)),
    Assumption("A2: two of three nodes' clocks step forward together", "overlap", (most_clocks_step,)),
    Assumption("A2: a node's clock steps forward and back unseen", "overlap", (step_is_undone_unseen,)),
    Assumption("A2: some clients' clocks lose a fifth of the time", "overlap", (with_clocks(CALM, lose_time),)),
    Assumption("A3: nodes forget, and clocks lag by more than the guard time", "token", (tokens_are_forgotten,)),
    Assumption("A4: rows do not stay locked", "update", (schedules_of(STALLED),), rows_stay_unlocked),
    Assumption("A5: the section reads before it claims", "update", (schedules_of(STALLED),), READ_BEFORE_CLAIM.change),
    Assumption("A6: secrets are not unique", "overlap", (schedules_of(LOSS),), few_secrets),
]
