"""Situations that rarely occur by chance: each takes a seed and returns the violations that the oracles found."""

from collections.abc import Callable, Set
from dataclasses import replace
from functools import wraps
from inspect import signature
from random import Random
from typing import Any

from django_redlock import Lease
from django_redlock.core.admission import OLD
from django_redlock.core.protocol import Survey
from django_redlock.exceptions import LockTakenError, RedlockError
from tests import consensus
from tests.machine.network import Node
from tests.machine.world import EPOCH

from .database import CLAIMED, increment
from .oracles import believed
from .profiles import CALM, LOSS, SLOW, TTL, WITHIN, Profile
from .schedule import THEMES, Client, Schedule

Violations = list[tuple[str, str]]
Scenario = Callable[[int], Violations]
Story = Callable[..., None]

POLL = 1.1  # seconds after which the first waiter asks again, at most
UNKNOWN = 3.0  # seconds: the clock is read in whole ones for the hold, for the election, and for the waiter

THREE = replace(CALM, sizes=((3, None),))


def scenario(seconds: float = 3.0, **options: Any) -> Callable[[Story], Scenario]:
    """Make a scenario of a story, a generator. Its first client plays it; none of them does anything on its own."""

    def of_story(story: Story) -> Scenario:
        @wraps(story)
        def scenario(seed: int) -> Violations:
            schedule = Schedule(THREE, seed, **options)
            clients = [schedule.start_client(idle=True) for _ in signature(story).parameters][1:]
            clients[0].spawn(story, schedule, *clients)
            schedule.world.run(seconds)
            return schedule.oracles.violations

        return scenario

    return of_story


def break_links(client: Client, fault: str, nodes: Set[int]) -> None:
    """Break a client's connections to some nodes, in one of the ways of a wire."""
    for link in client.links():
        if link.machine.number in nodes:
            setattr(link, fault, True)


def visit(client: Client) -> None:
    """Let a client hear from every node, under a name of its own."""
    lease = client.acquire((client.name,), 0.0)
    assert isinstance(lease, Lease)
    client.release(lease)


def holds_anything(machine: Any) -> bool:
    return bool(machine.store.execute(Survey(("{a}",))).rows[0].value)


def keeps(schedule: Schedule, lease: Any) -> None:
    if not believed(lease):
        schedule.oracles.violated("stuck", "the holder lost the lock")


def with_clocks(profile: Profile, change: Callable[[Client], object]) -> Scenario:
    """Return the scenario in which something is wrong with the clocks of each client."""

    class Changed(Schedule):
        def start_client(self, idle: bool = False) -> Client:
            client = super().start_client(idle)
            change(client)
            return client

    return lambda seed: Changed(profile, seed).run().violations


def stand_still(client: Client) -> None:
    """Let the wall clock stand still, so that all clients propose the same number."""
    client.wall.rate, client.wall.base = 0.0, EPOCH


def lag(client: Client) -> None:
    """Let the wall clocks of some clients lag by nearly half of the longest lease, which is the most allowed."""
    client.wall.base = EPOCH - client.world.random.choice((0.0, 0.48))


def simultaneous(*ways: dict[str, Any]) -> Scenario:
    """
    Return the scenario in which two to eight processes try once to take a free lock at the same moment.

    With a quorum answering, one wins; at least one, if they take it in different *ways*.
    """

    def scenario(seed: int) -> Violations:
        chance = Random(seed)
        nodes, silent = chance.choice(((3, 0), (3, 1), (5, 0), (5, 1), (5, 2), (4, 1), (2, 0)))
        schedule = Schedule(replace(CALM, sizes=((nodes, None),)), seed)
        world, ended, won = schedule.world, [], []
        clients = [schedule.start_client(idle=True) for _ in range(chance.randint(2, 8))]

        def once(client: Client, way: dict[str, Any]) -> None:
            schedule.world.sleep(world.random.uniform(0.0, chance.choice((0.0, 1e-4, 1e-3))))
            lease = client.acquire(("a",), 0.0, renew=True, **way)
            ended.append(client)
            if isinstance(lease, Lease):
                won.append(client)

        for client in clients:
            client.wall.step(chance.uniform(-0.2, 0.2))
            if chance.random() < 0.5:
                client.spawn(visit, client)
        world.run(world.now + 2.0)
        for machine in chance.sample(schedule.machines, silent):
            machine.stop(60.0)
        for client in clients:
            for machine in schedule.machines:
                schedule.faults.block(client, machine, chance.choice((0.0, 0.0, 0.0005, 0.005)))
            client.spawn(once, client, chance.choice(ways) if ways else {})
        world.run(world.now + 10.0)
        schedule.world.close()
        if len(ended) == len(clients) and (len(won) == 1 or (won and ways)):
            return schedule.oracles.violations
        winners = f"{len(won)} of {len(clients)} callers won, with {silent} of {nodes} nodes silent"
        return [*schedule.oracles.violations, ("winner", winners)]

    return scenario


def failed_attempt(fault: str) -> Scenario:
    """
    Return the scenario in which all connections fail during an attempt: it blocks the lock for a node timeout at most.

    If they are cut, the attempt is repeated and succeeds.
    """

    @scenario()
    def story(schedule: Schedule, first: Client, second: Client) -> None:
        visit(first)
        break_links(first, fault, {0, 1, 2})
        outcome = first.acquire(("a",), 0.0)
        if isinstance(outcome, RedlockError) == (fault == "doomed"):
            schedule.oracles.violated("votes", f"with {fault} connections, the attempt ended as {outcome}")
        if isinstance(outcome, Lease):
            first.release(outcome)
        schedule.world.sleep(second.rules.timeout(TTL))
        second.spawn(follow, schedule, second)

    def follow(schedule: Schedule, second: Client) -> None:
        outcome = second.acquire(("a",), 0.0)
        if not isinstance(outcome, Lease):
            schedule.oracles.violated("stuck", "a failed attempt blocks the lock for longer than one node timeout")

    return story


@scenario()
def late_raises(schedule: Schedule, client: Client, watcher: Client) -> None:
    """A node stops between the two rounds of an attempt, and gets the second when the lock has long expired."""
    client.wall.step(2.0)  # so far ahead that nodes accept no token of the first round
    stopping = schedule.world.random.choice(schedule.machines)

    def watch() -> None:
        while not holds_anything(stopping):
            schedule.world.sleep(0.00002)
        stopping.stop(1.2 * TTL)

    visit(client)
    watcher.spawn(watch)
    client.acquire(("a",), 0.0)


@scenario()
def stepping_node(schedule: Schedule, holder: Client, warm: Client, cold: Client) -> None:
    """A bare quorum holds the lock, and one of its nodes drops the key because its clock steps, away and back."""
    warm.spawn(visit, warm)
    visit(holder)
    schedule.world.sleep(0.3)
    break_links(holder, "deaf", {2})
    lease = holder.acquire(("a",), 0.0)
    for seconds, pause in ((60.0, 0.3), (-60.0, 0.0)):
        schedule.machines[0].set_clock(seconds)
        schedule.world.sleep(pause)
        for client in (warm, cold):
            client.spawn(client.acquire, ("a",), 0.0)
        schedule.world.sleep(0.2)
    keeps(schedule, lease)


@scenario()
def moving_endpoint(schedule: Schedule, holder: Client, cold: Client) -> None:
    """A bare quorum holds the lock, and a replica that lacks it takes the place of one of its nodes."""
    machine = schedule.machines[0]
    served = machine.store.records.served
    machine.store.records.served = schedule.world.random.choice((served, None))
    machine.copy()
    machine.store.records.served = served
    visit(holder)
    break_links(holder, "deaf", {2})
    lease = holder.acquire(("a",), 0.0)
    machine.fail_over()
    cold.spawn(cold.acquire, ("a",), 0.0)
    schedule.world.sleep(0.1)
    keeps(schedule, lease)


@scenario()
def moved_set(schedule: Schedule, holder: Client, cold: Client) -> None:
    """Three other servers, new to these locks, take the addresses of all nodes while a lock is held."""
    for machine in schedule.machines:
        served, machine.store.records.served = machine.store.records.served, None
        machine.copy()
        machine.store.records.served = served
    visit(holder)
    lease = holder.acquire(("a",), 0.0)
    for machine in schedule.machines:
        machine.fail_over()
        machine._promoted = ""
    cold.spawn(cold.acquire, ("a",), 0.0)
    schedule.world.sleep(0.1)
    keeps(schedule, lease)


def leader_dies_with_the_holder(seed: int) -> Violations:
    """A holder dies, and the store's leader changes: after the deadline the lock is free by a ttl and an election."""
    profile = replace(CALM, sizes=((1, None),), stores=(1,), cancel=0.0)
    schedule = Schedule(replace(profile, apart=(0.0, 60.0)[seed % 2]), seed)
    world, oracles, (store,) = schedule.world, schedule.oracles, schedule.stores
    holder, waiter = schedule.start_client(idle=True), schedule.start_client(idle=True)

    def story() -> None:
        visit(holder)
        schedule.world.sleep(world.random.random())  # so that more or less is known about the clock
        lease = holder.acquire(("a",), 0.0)
        world.at(world.now + world.random.uniform(0.0, TTL), store.cluster.elect)
        waiter.spawn(wait, world.now + lease.hold.remaining(holder.clock()))
        schedule.world.sleep(world.random.uniform(0.0, 0.9 * TTL))
        holder.kill()

    def wait(deadline: float) -> None:
        lease = waiter.acquire(("a",), None)
        if not isinstance(lease, Lease) or world.now < deadline:
            oracles.violated("overlap", "the lock was free before the deadline of its holder")
        if world.now > deadline + TTL + store.cluster.election + UNKNOWN + POLL:
            oracles.violated("stuck", f"the lock was free {world.now - deadline:.3f} s after its deadline")
        waiter.sessions.append((None, "a"))

    holder.spawn(story)
    world.run(10.0)
    schedule.world.close()
    if not waiter.sessions:
        oracles.violated("stuck", "the lock of a dead holder was not free")
    return oracles.violations


@scenario()
def cancelled(schedule: Schedule, holder: Client, victim: Client) -> None:
    """An acquisition that is cancelled at any moment leaves nothing behind: no key, and no entry in a queue."""
    random = schedule.world.random

    def attempt() -> None:
        victim.acquire(("a",), None)
        victim.sessions.append((None, "a"))  # it was quicker

    lease = holder.acquire(("a",), 0.0) if random.random() < 0.5 else None
    if random.random() < 0.7:
        victim.spawn(visit, victim)
        schedule.world.sleep(0.1)
    task = victim.spawn(attempt)
    schedule.world.sleep(random.choice((0.0005, 0.002, 0.3)) * random.random())
    if not victim.sessions:
        task.cancel()
    schedule.world.sleep(victim.rules.timeout(TTL))
    if isinstance(lease, Lease):
        holder.release(lease)
        schedule.world.sleep(0.01)
    for machine in schedule.machines:
        if not victim.sessions and (holds_anything(machine) or machine.store.waiters("{a}")):
            schedule.oracles.violated("ghost", f"a cancelled acquisition left something on node {machine.number}")


@scenario()
def sent_releases(schedule: Schedule, holder: Client) -> None:
    """Releases that are lost on the way to two of three nodes arrive, although nobody uses the nodes again."""
    random = schedule.world.random
    visit(holder)
    lease = holder.acquire(("a",), 0.0)
    schedule.world.sleep(0.01)
    break_links(holder, random.choice(("deaf", "mute", "doomed", "broken")), set(random.sample(range(3), 2)))
    holder.release(lease, sends=True)
    schedule.world.sleep(0.5 * TTL)
    for machine in schedule.machines:
        if holds_anything(machine):
            schedule.oracles.violated("stuck", f"node {machine.number} still has a lock that was released")


@scenario()
def emptied(schedule: Schedule, holder: Client, other: Client) -> None:
    """A bare quorum holds the lock, and one of its nodes loses its memory; nobody's connection ends."""
    other.spawn(visit, other)
    visit(holder)
    break_links(holder, "deaf", {2})
    lease = holder.acquire(("a",), 0.0)
    machine = schedule.machines[0]
    if schedule.world.random.random() < 0.5:
        machine.lose_memory()
    else:
        machine.demote()
        machine.promote()
    other.spawn(other.acquire, ("a",), 0.0)
    schedule.world.sleep(0.1)
    keeps(schedule, lease)


def moved_by_a_proxy(seed: int) -> Violations:
    """A proxy moves the connection of a holder to another server, unnoticed, and the lease is renewed there."""
    schedule = Schedule(replace(CALM, sizes=((1, None),)), seed, restart_guard=True)
    holder, other = schedule.start_client(idle=True), schedule.start_client(idle=True)
    elsewhere = Node(schedule.world, 0, schedule.oracles)
    elsewhere.store.records.served = ("elsewhere", "", int((EPOCH - 1e6) * 1e6))

    def story() -> None:
        other.spawn(visit, other)
        visit(holder)
        holder.acquire(("a",), 0.0, renew=True)
        for link in holder.links():
            link.machine = elsewhere
        schedule.world.sleep(1.5 * TTL)
        other.spawn(other.acquire, ("a",), 0.0)

    holder.spawn(story)
    schedule.world.run(3.0)
    return schedule.oracles.violations


def evicting(seed: int) -> Violations:
    """A server is set to evict keys; ten seconds later no process with an old connection relies on it."""
    schedule = Schedule(replace(CALM, sizes=((1, None),)), seed)
    first, second = schedule.start_client(idle=True), schedule.start_client(idle=True)
    (machine,) = schedule.servers

    def story() -> None:
        for client in (first, second):
            client.spawn(try_once, client)
        schedule.world.sleep(TTL)
        machine.evicts = True
        until = schedule.world.now + OLD
        while schedule.world.now < until:
            schedule.world.sleep(schedule.world.random.choice((0.5, 2.0, 11.0)))
            first.spawn(try_once, first)
        for client in (first, second):
            client.spawn(client.acquire, ("a",), 0.0)
            schedule.world.sleep(0.1)
            machine.evict()

    def try_once(client: Client) -> None:
        lease = client.acquire((client.name,), 0.0)
        if isinstance(lease, Lease):
            client.release(lease)

    first.spawn(story)
    schedule.world.run(40.0)
    return schedule.oracles.violations


@scenario()
def own_ghost(schedule: Schedule, caller: Client, other: Client) -> None:
    """All connections fail during the only attempt at a lock that nobody holds, before or after it is executed."""
    visit(caller)
    break_links(caller, schedule.world.random.choice(("doomed", "broken")), {0, 1, 2})
    outcome = caller.acquire(("a",), 0.0)
    if isinstance(outcome, LockTakenError):
        schedule.oracles.violated("ghost", "a caller was refused because of its own attempt")


def no_lock(seed: int) -> Violations:
    """Without any lock, with tokens that are repeated and out of order, no claimed increment is lost."""
    schedule = Schedule(replace(SLOW, stall=0.05), seed)
    random = schedule.world.random

    def work(client: Client) -> None:
        for _ in range(20):
            token, owner = random.randrange(1, 40), f"{random.getrandbits(64):016x}"
            for _ in range(random.randrange(1, 4)):
                increment(schedule.database, client, "a", token, owner, CLAIMED)

    for _ in range(4):
        client = schedule.start_client(idle=True)
        client.spawn(work, client)
    schedule.world.run(120.0)
    schedule.oracles.finish([], schedule.database)
    return schedule.oracles.violations


def amnesia(nodes: int, quorum: int, forgetful: int, **hazards: float) -> Scenario:
    """Return the scenario in which the first *forgetful* nodes lose their data again and again, without the guard."""
    profile = replace(LOSS, sizes=((nodes, quorum),), crash=2.0, **hazards)

    def scenario(seed: int) -> Violations:
        schedule = Schedule(profile, seed, restart_guard=False)
        schedule.oracles.guarded = False
        schedule.crashing = schedule.machines[:forgetful]
        schedule.busy, schedule.wishes = 5.0, THEMES[0]
        return schedule.run().violations

    return scenario


SCENARIOS: dict[str, Scenario] = {
    "same microsecond": with_clocks(CALM, stand_still),
    "simultaneous": simultaneous(),
    "simultaneous and in disagreement": simultaneous({}, {"shared": True}, {"limit": 2}, {"limit": 3}),
    "lost replies": failed_attempt("mute"),
    "late raises": late_raises,
    "stepping node": stepping_node,
    "moving endpoint": moving_endpoint,
    "moved set": moved_set,
    "connections reset": failed_attempt("doomed"),
    "emptied": emptied,
    "moved by a proxy": moved_by_a_proxy,
    "evicting": evicting,
    "own ghost": own_ghost,
    "no lock": no_lock,
    "cancelled": cancelled,
    "sent releases": sent_releases,
    **({"leader dies with the holder": leader_dies_with_the_holder} if consensus.PRESENT else {}),
    "clocks lag": with_clocks(replace(WITHIN, skew=0.0, rate=0.0, crash=0.6, forget=1.0), lag),
    # Without the restart guard, 2q - N - 1 nodes may forget everything.
    **{
        f"{forgetful} of {nodes} nodes forget": amnesia(nodes, quorum, forgetful, skew=2.0, cut=0.05)
        for nodes, quorum, forgetful in ((4, 3, 1), (5, 4, 2), (2, 2, 1))
    },
}
