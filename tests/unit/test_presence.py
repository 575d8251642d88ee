"""The presence of a process: its locks are neither called orphaned nor cleared; histories in virtual time."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from io import StringIO
from typing import Any
from unittest.mock import patch

import pytest
from django.core.management import CommandError, call_command

from django_redlock import Lease, LockTakenError, QuorumUnavailableError
from django_redlock.core.names import SECRET_SIZE
from django_redlock.core.protocol import SHARED
from django_redlock.engine.presence import Presence
from django_redlock.engine.watchdog import NEVER, belongs_to, due, note_drops
from django_redlock.inventory import State, find_lock, held_locks, remove_stale, stale_keys
from django_redlock.runtime.process import process
from django_redlock.testing import Simulation
from django_redlock.testing.simulation import SimulatedProcess, VirtualWatchdog
from tests.held import found

RULES = {"ttl": 30.0, "max_ttl": 60.0, "restart_guard": False, "clock_guard": False, "node_timeout": 0.2}


class Watchdog(VirtualWatchdog):
    """The watchdog of a simulation in which processes send their signs of life as well."""

    def watch(self, tended: Any) -> None:
        self._agenda(tended).add(tended)

    def forget(self, tended: Any) -> None:
        self._agenda(tended).drop(tended)

    def tends(self, keeper: object) -> bool:
        return any(belongs_to(each, keeper) and due(each) < NEVER for each in self._process_of(keeper).agenda)

    def _agenda(self, tended: Any) -> Any:
        return self._process_of(tended._keeper).agenda if isinstance(tended, Presence) else super()._agenda(tended)


class World:
    """Processes that take locks and show that they live, and an operator who looks at them."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.living: list[SimulatedProcess] = []

    def process(self, name: str) -> SimulatedProcess:
        """Start another process."""
        with patch.object(process, "name", name):
            self.living.append(self.sim.rival(name))
        return self.living[-1]

    def take(self, who: SimulatedProcess, name: str, **options: Any) -> Lease:
        """Have a process take a lock that is free."""
        with patch.object(process, "name", who.name):
            lock = who.lock(name, wait=0, **options)
        return lock.acquire()

    def drop(self, name: str) -> None:
        """Have a process take a lock and forget its lease."""
        self.take(self.process("forgetful"), name)
        self.sim._leases.clear()
        note_drops()

    def kill(self, who: SimulatedProcess) -> None:
        """End a process without a warning."""
        self.living.remove(who)
        who.kill()

    def clear(self) -> str:
        """Run ``redlock_clear --no-input``; returns what it writes."""
        out = StringIO()
        with suppress(CommandError):  # too few nodes answer
            call_command("redlock_clear", "--no-input", stdout=out, stderr=StringIO())
        return out.getvalue()

    def holders(self) -> set[tuple[str, str, str]]:
        """Return who holds what on which node, whatever state the node is in."""
        return {
            (node.name, where, secret)
            for node in self.sim.nodes
            for where, (value, _) in list(node.store.records.holders.items())
            if node.store.records.holder(where, node.store.now()) is not None
            for secret in (node.store.sharers(where) if value.startswith(SHARED) else [value[:SECRET_SIZE]])
        }


@contextmanager
def simulated(nodes: int = 3, **options: Any) -> Iterator[World]:
    sim = Simulation(nodes=nodes, check=False, **{**RULES, **options})
    sim.runtime = replace(sim.runtime, watchdog=Watchdog(sim._process_of))
    with sim:
        yield World(sim)


@pytest.fixture
def world() -> Iterator[World]:
    with simulated() as world:
        yield world


def test_a_dropped_lease_is_not_renewed_and_its_process_lives(world):
    """Nobody renews a lease that was dropped unreleased. Its process lives, so the lock is not orphaned."""
    with pytest.warns(ResourceWarning, match=r"Lock 'orders:7' .*dropped"):
        world.drop("orders:7")
    states = []
    for _ in range(29):
        states.append(found().state)
        world.clear()
        world.sim.advance(1.0)

    assert list(dict.fromkeys(states)) == [State.HELD, State.UNRENEWED]
    assert states.index(State.UNRENEWED) == 16  # half of its lease has gone by
    world.sim.advance(1.0)
    assert find_lock("orders:7") is None


def test_an_orphaned_lock_is_known_and_left_to_end(world):
    """The lock of a killed process is orphaned, and ends by itself; a process that stands still looks the same."""
    dead, paused = world.process("dead"), world.process("paused")
    world.take(dead, "a")
    lease = world.take(paused, "b")
    world.sim.advance(9.0)
    world.kill(dead)
    paused.stopped = True
    world.sim.advance(15.0)

    assert (found("a").state, found("b").state) == (State.ORPHANED, State.ORPHANED)
    assert world.clear() == "Nothing is stale.\n"
    paused.stopped = False
    world.sim.advance(15.0)
    assert find_lock("a") is None
    assert (found("b").state, lease.valid()) == (State.HELD, True)


# Random histories


class History(World):
    """One random history; after each look of the operator's, what living processes hold is still there."""

    def __init__(self, sim: Simulation, seed: int) -> None:
        super().__init__(sim)
        self.random = random.Random(seed)
        self.leases: list[tuple[SimulatedProcess, Lease]] = []
        self.done: list[str] = []
        self.removed = 0

    def go_on(self) -> None:
        """Do one random thing."""
        action = self.random.choice(ACTIONS)
        self.done.append(f"{self.sim.clock():.1f} {action}")
        getattr(self, f"do_{action}")()
        self.look()

    def look(self) -> None:
        """Do what ``redlock_clear --no-input`` does, and see what has gone."""
        before = self.holders()
        for key in stale_keys(held_locks()):
            remove_stale(key)
        gone = {secret for *_, secret in before - self.holders()}
        self.removed += len(gone)
        now = self.sim.clock()
        held = {lease.secret for who, lease in self.leases if who in self.living and lease.hold.remaining(now) > 0}
        assert not gone & held, "\n".join(self.done)

    def do_start(self) -> None:
        if len(self.living) < 4:
            self.process(f"p{len(self.sim._processes)}")

    def do_take(self) -> None:
        if awake := [who for who in self.living if not who.stopped]:
            who, name = self.random.choice(awake), self.random.choice("abc")
            how: dict[str, Any] = self.random.choice([{}, {}, {"renew": False}, {"shared": True}, {"ttl": 60.0}])
            with suppress(LockTakenError, QuorumUnavailableError):
                self.leases.append((who, self.take(who, name, **how)))

    def do_extend(self) -> None:
        for who, lease in self.leases:
            if who in self.living and not who.stopped and not lease.hold.renewed and lease.valid():
                lease.extend()

    def do_release(self) -> None:
        for who, lease in self.random.sample(self.leases, min(1, len(self.leases))):
            if who in self.living and not who.stopped:
                lease.release()

    def do_drop(self) -> None:
        """Have a lease no longer be renewed, as when the last reference to it is gone."""
        running = [(who, lease) for who, lease in self.leases if who in self.living and not who.stopped]
        held = [(who, lease) for who, lease in running if lease.valid()]
        for who, lease in self.random.sample(held, min(1, len(held))):
            who.agenda.drop(lease)
            who.manager.driver.dropped.append(lease.hold.deadline)
            self.sim.advance(self.random.choice([0.0, 17.0]))

    def do_pause(self) -> None:
        for who in self.random.sample(self.living, min(1, len(self.living))):
            who.stopped = True
            self.sim.after(self.random.choice([1.0, 8.0, 15.0, 50.0, 90.0]), partial(setattr, who, "stopped", False))

    def do_kill(self) -> None:
        if self.random.random() < 0.4 and self.living:
            self.kill(self.random.choice(self.living))

    def do_disaster(self) -> None:
        """End a process, and have its keys outlast it."""
        self.do_kill()
        self.do_meddle()

    def do_stall(self) -> None:
        """Have a process that has held a lock for long stand still, and its keys lose their expiry meanwhile."""
        for _ in range(5):
            self.do_extend()
            self.sim.advance(18.0)
        self.do_extend()
        for who in self.random.sample(self.living, min(1, len(self.living))):
            who.stopped = True
            self.sim.after(self.random.choice([12.0, 25.0, 50.0]), partial(setattr, who, "stopped", False))
        self.do_meddle()
        self.sim.advance(11.0)  # by now the nodes have not heard it for longer than a process is silent

    def do_meddle(self) -> None:
        """Take the expiry from keys, or make it a long one."""
        left = self.random.choice([None, 3600.0])
        for node in self.random.sample(self.sim.nodes, self.random.randint(1, len(self.sim.nodes))):
            for where, (value, _) in list(node.store.records.holders.items()):
                if not where.endswith("~p") and node.store.records.holder(where, node.store.now()):
                    node.store.put(where, value, left)

    def do_node(self) -> None:
        node = self.random.choice(self.sim.nodes)
        fate = self.random.choice(["crash", "restart", "silent", "start"])
        node.silent = fate == "silent"
        if fate in ("crash", "restart", "start"):
            getattr(node, fate)()

    def do_wait(self) -> None:
        self.sim.advance(self.random.choice([0.5, 2.0, 7.0, 12.0, 40.0, 90.0]))

    do_wait_more = do_wait


ACTIONS = [name.removeprefix("do_") for name in vars(History) if name.startswith("do_")]


def test_redlock_clear_never_removes_what_a_living_process_holds():
    """In random histories of processes, nodes and keys that somebody meddled with, no living holder loses its lock."""
    removed = 0
    for seed in range(60):
        with simulated() as world:
            history = History(world.sim, seed)
            for _ in range(40):
                history.go_on()
            removed += history.removed

    assert removed > 5  # or nothing has been tried
