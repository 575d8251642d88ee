"""Situations that rarely occur by chance."""

from dataclasses import replace
from typing import Any

import pytest

from django_redlock import Lease
from django_redlock.core.protocol import ENROLMENT
from tests.simulation.profiles import CALM, EVERYTHING, OF_STORES, TTL, Profile
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.schedule import Client, Schedule, run

# 10 of the others
SEEDS = {
    "cancelled": 60,
    "simultaneous": 40,
    "simultaneous and in disagreement": 40,
    "clocks lag": 30,
    "sent releases": 20,
    "leader dies with the holder": 20,
}


@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name in SCENARIOS for seed in range(SEEDS.get(name, 10))])
def test_situations_that_rarely_occur_by_chance(name: str, seed: int):
    """Each scenario says what it tries, and what must hold then."""
    assert SCENARIOS[name](seed) == []


@pytest.mark.parametrize("profile", [EVERYTHING, *OF_STORES[2:]], ids=lambda profile: profile.name.replace(" ", "-"))
def test_one_seed_is_one_schedule(profile: Profile):
    """The same seed gives the same trace, to the last line, so that a failure can be repeated."""
    first, second = (run(profile, 5, traced=True) for _ in range(2))

    assert first.trace == second.trace
    assert len(first.trace) > 100


def schedule_of(nodes: int = 3, clients: int = 2, seed: int = 1, **hazards: Any) -> tuple[Schedule, list[Client]]:
    """Return a calm schedule, and clients that do nothing on their own."""
    schedule = Schedule(replace(CALM, sizes=((nodes, None),), **hazards), seed)
    return schedule, [schedule.start_client(idle=True) for _ in range(clients)]


@pytest.mark.parametrize("seed", range(10))
def test_lock_of_a_dead_holder(seed: int):
    """A waiter gets the lock of a holder that died within one lease and one pause of at most ten retry delays."""
    schedule, [holder, waiter] = schedule_of(seed=seed)
    got = []

    def hold() -> None:
        holder.acquire(("a",), 0.0)
        waiter.spawn(wait)
        holder.kill()

    def wait() -> None:
        lease = waiter.acquire(("a",), None)
        got.append(schedule.world.now)
        assert isinstance(lease, Lease)

    holder.spawn(hold)
    schedule.world.run(10.0)

    assert len(got) == 1
    assert got[0] < TTL + 10 * waiter.rules.retry_delay + 0.1


def queue(seed: int, waiters: int, nodes: int = 3, **hazards: float) -> tuple[list[int], float, float]:
    """Return in what order waiters were served, in how many seconds, and for how many node commands each."""
    schedule, clients = schedule_of(nodes, 4, seed, **hazards)
    served: list[int] = []

    def hold() -> None:
        lease = clients[0].acquire(("a",), 0.0, renew=True)
        for number in range(waiters):
            schedule.world.sleep(0.01)
            client = clients[number % len(clients)]
            client.spawn(wait, client, number)
        schedule.world.sleep(1.0)
        began.extend((schedule.world.now, schedule.oracles.commands))
        clients[0].release(lease)

    def wait(client: Client, number: int) -> None:
        lease = client.acquire(("a",), None)
        assert isinstance(lease, Lease)
        served.append(number)
        ended[:] = schedule.world.now, schedule.oracles.commands
        schedule.world.sleep(0.005)
        client.release(lease)

    began: list[float] = []
    ended: list[float] = []
    clients[0].spawn(hold)
    schedule.world.run(120.0)
    return served, ended[0] - began[0], (ended[1] - began[1]) / waiters


@pytest.mark.parametrize(
    ("nodes", "hush", "longest"), [(2, 0.0, 0.02), (3, 0.0, 0.02), (4, 0.0, 0.02), (5, 0.0, 0.02), (3, 1.0, 1.1)]
)
def test_waiters_are_served_in_order(nodes: int, hush: float, longest: float):
    """First come, first served, one soon after the other; without notifications, after a poll of the first waiter."""
    served, took, _ = queue(1, waiters=20, nodes=nodes, hush=hush)

    assert served == list(range(20))
    assert took < 20 * longest


@pytest.mark.parametrize("hazards", [{}, {"cut": 0.02}], ids=["calm", "lost requests"])
def test_commands_do_not_grow_with_the_waiters(hazards: dict[str, float]):
    """An acquisition costs the nodes about the same with ten waiters as with forty, also when holders lack a node."""
    few = max(queue(seed, waiters=10, **hazards)[2] for seed in range(5))
    many = max(queue(seed, waiters=40, **hazards)[2] for seed in range(5))

    assert many < few + 12


def test_returned_grants_notify_nobody():
    """
    The first waiter, if it lacks only votes, is not notified by its own returned grants.

    When the holder releases, the clock of one node has just stepped, so that it may not vote for a while, and another
    node reserves the lock for a waiter that is gone. Nobody notifies when that has ended: the waiter asks as contenders
    do.
    """
    schedule, [holder, waiter] = schedule_of()
    world, (doubtful, occupied, _) = schedule.world, schedule.machines
    got = []

    def hold() -> None:
        lease = holder.acquire(("a",), 0.0)
        waiter.spawn(wait)
        schedule.world.sleep(0.3)
        occupied.store.records.queues["{a}"].enrol("gone|1", 0, occupied.clock() + ENROLMENT)
        doubtful.set_clock(0.05)
        holder.release(lease)

    def wait() -> None:
        lease = waiter.acquire(("a",), None)
        assert isinstance(lease, Lease)
        got.append(world.now)

    holder.spawn(hold)
    world.run(1.3)

    assert not got
    assert schedule.oracles.commands < 150  # thousands, if each attempt triggered the next
    world.run(10.0)
    assert got[0] < 0.3 + 1.02 * TTL + 10 * waiter.rules.retry_delay
