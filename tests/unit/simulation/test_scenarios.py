"""Situations that rarely occur by chance."""

from dataclasses import replace

import pytest

from django_redlock.core.node_state import NodeState
from django_redlock.core.protocol import ENROLMENT, Acquire, Extend, Kind, Raise, Release, Request, Term
from tests.simulation.driver import Lease
from tests.simulation.profiles import APART, CALM, LEADERS, MIXED, TTL, Profile
from tests.simulation.scenarios import SCENARIOS, amnesia, lagging
from tests.simulation.schedule import Client, Schedule, run
from tests.simulation.world import Routine, Sleep, World

SEEDS = {
    "cancelled": 60,
    "simultaneous": 40,
    "sent releases": 20,
    "leader dies with the holder": 20,
}  # 10 of the others


@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name in SCENARIOS for seed in range(SEEDS.get(name, 10))])
def test_situations_that_rarely_occur_by_chance(name: str, seed: int):
    """Each scenario says what it tries, and what must hold then."""
    assert SCENARIOS[name](seed) == []


@pytest.mark.parametrize("profile", [LEADERS, APART, MIXED], ids=lambda profile: profile.name.replace(" ", "-"))
def test_leaders_change(profile: Profile):
    """A few schedules; many more run from new seeds elsewhere."""
    assert [str(outcome) for seed in range(8) if (outcome := run(profile, seed)).failures] == []


def test_leaders_change_in_one_schedule_per_seed():
    """The same seed gives the same trace with tables in greenlets, too."""
    first, second = (run(MIXED, 5, traced=True) for _ in range(2))

    assert first.trace == second.trace
    assert any("leads in term" in line for line in first.trace)


@pytest.mark.parametrize(("nodes", "quorum", "forgetful"), [(4, 3, 1), (5, 4, 2), (2, 2, 1)])
def test_quorums_that_survive_amnesia(nodes: int, quorum: int, forgetful: int):
    """Without the restart guard, 2q - N - 1 nodes may forget everything, with clocks that are off by seconds."""
    scenario = amnesia(nodes, quorum, forgetful, skew=2.0, cut=0.05)

    assert [violation for seed in range(12) for violation in scenario(seed)] == []


@pytest.mark.parametrize("seed", range(30))
def test_clocks_lag_within_the_guard(seed: int):
    """Whatever data the nodes lose, tokens are unique and in order while clocks lag by less than guard - ahead."""
    assert lagging(0.506)(seed) == []


@pytest.mark.parametrize("seed", range(10))
def test_clocks_lag_beyond_the_guard(seed: int):
    """If clocks lag by more than the guard, the database still loses nothing."""
    assert [violation for violation in lagging(3.0)(seed) if violation[0] == "update"] == []


@pytest.mark.parametrize(("nodes", "down"), [(3, 1), (4, 1), (5, 2)])
def test_nodes_that_are_down_cost_no_time(nodes: int, down: int):
    """
    The greatest allowed number of nodes is silent, and an acquisition over warm links waits for none of them.
    """
    schedule = Schedule(replace(CALM, sizes=((nodes, None),)), seed=1)
    client = schedule.start_client(idle=True)
    took = []

    def attempts() -> Routine:
        warm = yield from client.acquire(("warm",), 0.0)
        yield from client.release(warm)
        for machine in schedule.machines[:down]:
            machine.stop(60.0)
        for _ in range(20):
            began = schedule.world.now
            lease = yield from client.acquire(("a",), 0.0)
            assert isinstance(lease, Lease)
            took.append(schedule.world.now - began)
            yield from client.release(lease)

    client.spawn(attempts())
    schedule.world.run(60.0)

    assert len(took) == 20
    assert max(took) < 0.002


@pytest.mark.parametrize("seed", range(10))
def test_lock_of_a_dead_holder(seed: int):
    """A waiter gets the lock of a holder that died within one lease and one pause of at most ten retry delays."""
    schedule = Schedule(CALM, seed)
    holder, waiter = (schedule.start_client(idle=True) for _ in range(2))
    got = []

    def hold() -> Routine:
        lease = yield from holder.acquire(("a",), 0.0)
        assert isinstance(lease, Lease)
        waiter.spawn(wait())
        holder.kill()

    def wait() -> Routine:
        lease = yield from waiter.acquire(("a",), None)
        got.append(schedule.world.now)
        assert isinstance(lease, Lease)

    holder.spawn(hold())
    schedule.world.run(10.0)

    assert len(got) == 1
    assert got[0] < TTL + 10 * waiter.rules.retry_delay + 0.1


def queue(seed: int, waiters: int, nodes: int = 3, **hazards: float) -> tuple[list[int], float, float]:
    """Return in what order waiters were served, in how many seconds, and for how many node commands each."""
    schedule = Schedule(replace(CALM, sizes=((nodes, None),), **hazards), seed)
    clients = [schedule.start_client(idle=True) for _ in range(4)]
    served: list[int] = []

    def hold() -> Routine:
        lease = yield from clients[0].acquire(("a",), 0.0)
        clients[0].renew(lease)
        for number in range(waiters):
            yield Sleep(0.01)
            client = clients[number % len(clients)]
            client.spawn(wait(client, number))
        yield Sleep(1.0)
        began.extend((schedule.world.now, schedule.oracles.commands))
        yield from clients[0].release(lease)

    def wait(client: Client, number: int) -> Routine:
        lease = yield from client.acquire(("a",), None)
        assert isinstance(lease, Lease)
        served.append(number)
        ended[:] = schedule.world.now, schedule.oracles.commands
        yield Sleep(0.005)
        yield from client.release(lease)

    began: list[float] = []
    ended: list[float] = []
    clients[0].spawn(hold())
    schedule.world.run(120.0)
    return served, ended[0] - began[0], (ended[1] - began[1]) / waiters


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_waiters_are_served_in_order(nodes: int):
    """First come, first served, one soon after the other, for every number of nodes."""
    served, took, _ = queue(1, waiters=20, nodes=nodes)

    assert served == list(range(20))
    assert took < 20 * 0.02


def test_notifications_that_are_lost():
    """Without notifications the order is the same, and nobody waits longer than the poll of the first waiter."""
    served, took, _ = queue(1, waiters=20, hush=1.0)

    assert served == list(range(20))
    assert took < 20 * 1.1


@pytest.mark.parametrize("hazards", [{}, {"cut": 0.02}], ids=["calm", "lost requests"])
def test_commands_do_not_grow_with_the_waiters(hazards: dict[str, float]):
    """
    An acquisition costs the nodes about the same with ten waiters as with forty, also when holders lack a node.
    """
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
    schedule = Schedule(replace(CALM, sizes=((3, None),)), seed=1)
    world, (doubtful, occupied, _) = schedule.world, schedule.machines
    holder, waiter = (schedule.start_client(idle=True) for _ in range(2))
    got = []

    def hold() -> Routine:
        lease = yield from holder.acquire(("a",), 0.0)
        waiter.spawn(wait())
        yield Sleep(0.3)
        occupied.store.records.queues["{a}"].enrol("gone|1", 0, occupied.clock() + ENROLMENT)
        doubtful.set_clock(0.05)
        yield from holder.release(lease)

    def wait() -> Routine:
        lease = yield from waiter.acquire(("a",), None)
        assert isinstance(lease, Lease)
        got.append(world.now)

    holder.spawn(hold())
    world.run(1.3)

    assert not got
    assert schedule.oracles.commands < 150  # thousands, if each attempt triggered the next
    world.run(10.0)
    assert got[0] < 0.3 + 1.02 * TTL + 10 * waiter.rules.retry_delay


def outcome(request: Request, store: NodeState) -> tuple[Kind, object]:
    return store.execute(request).kind, (
        store.records.holders.copy(),
        store.records.fences.copy(),
        store.records.tombstones.copy(),
    )


@pytest.mark.parametrize("seed", range(20))
def test_requests_that_are_repeated(seed: int):
    """Repeating any request at once changes nothing on the node, and only the second half of the reply."""
    again = {Kind.ACCEPTED: {Kind.GRANTED}, Kind.RELEASED: {Kind.GONE, Kind.BUSY}}
    world = World(seed)
    random, store = world.random, NodeState(lambda: 1_795_000_000.0)
    for _ in range(200):
        secret, number = random.choice("abc") * 32, random.randrange(1_795_000_000_000_000, 1_795_000_000_000_009)
        request = random.choice(
            [
                Acquire(("{a}",), secret, secret, TTL, number, 60.0, 1.0),
                Raise(("{a}",), secret, number, 60.0),
                Extend((Term(("{a}",), secret, secret, TTL, number),), 60.0),
                Release(("{a}",), secret, random.choice((0.0, 0.0, TTL))),
            ]
        )

        kind, left = outcome(request, store)
        second, left_again = outcome(request, store)

        assert left == left_again
        assert second in again.get(kind, {kind})
        if random.random() < 0.05:
            store.reset()
