"""Rounds over nodes that fail: every combination, the end of a round's time, links that come late, late releases."""

import asyncio
import time
from itertools import combinations
from unittest.mock import Mock

import pytest

from django_redlock import LockManager, LockTakenError, QuorumUnavailableError, lock
from django_redlock.core.admission import Admission
from django_redlock.core.protocol import Acquire, Kind
from django_redlock.core.round import Round
from django_redlock.core.rules import Rules
from django_redlock.engine import redelivery
from django_redlock.engine.connections import Breaker, Breakers, ConnectionSet
from django_redlock.engine.rounds import Gather
from django_redlock.engine.rounds_async import AsyncGather, TimeLimits
from django_redlock.nodes.memory import AsyncMemoryLink, MemoryLink, MemoryNode
from django_redlock.runtime import clock
from django_redlock.runtime.clock import OWED, SLICES, Patience, steady
from django_redlock.testing import Simulation
from tests.managers import Flavour, Manager, eventually, rules

NAMES = ("a", "b", "c")
PATIENT = {"ttl": 600.0, "max_ttl": 600.0, "node_timeout": 60.0}
HASTY = {"node_timeout": 0.01}  # asyncio waits here for nodes that do not answer


async def works(manager: LockManager, flavour: Flavour) -> None:
    """Use every operation of a lock once."""
    lease = await flavour.acquire(manager.lock("a", wait=0))
    assert await flavour.extend(lease)
    with pytest.raises(LockTakenError):
        await flavour.acquire(manager.lock("a", wait=0))
    assert await flavour.release(lease) == "released"
    assert lease.extensions == 1
    again = await flavour.acquire(manager.lock("a", wait=0))
    assert again.fencing_token > lease.fencing_token
    assert await flavour.release(again) == "released"


async def no_quorum(manager: LockManager, flavour: Flavour) -> None:
    """Fail to take a lock."""
    with pytest.raises(QuorumUnavailableError, match="3 of 5 nodes must answer"):
        await flavour.acquire(manager.lock("a", wait=0))


@pytest.mark.parametrize("failing", range(6))
@pytest.mark.parametrize("fault", ["down", "deaf", "silent"])
async def test_every_subset_of_failing_nodes(flavour: Flavour, fault: str, failing: int):
    """Any two of five may fail in any way; with three gone the result is *no quorum*, never *taken*."""
    for subset in combinations(range(5), failing):
        nodes = [MemoryNode(f"m{number}") for number in range(5)]
        manager = LockManager(nodes, rules(5, **(PATIENT if failing <= 2 else HASTY)))
        for node in subset:
            setattr(nodes[node], fault, True)

        await (works if failing <= 2 else no_quorum)(manager, flavour)

        await flavour.close(manager)


def round_of(timeout: float, needed: int, *, mending: bool = False) -> Round:
    request = Acquire(("{a}",), "0" * 32, "0" * 32, 30.0, 1, 600.0, 600.0)
    requests = dict.fromkeys(range(3), request)
    return Round(requests, lambda replies: len(replies) == needed, timeout, mending=mending)


def admission() -> Admission:
    return Admission(Rules(3, ttl=30.0, restart_guard=False), NAMES, steady, time.time)


class MuteLink(MemoryLink):
    """A link whose node accepts everything and answers nothing."""

    def fileno(self) -> int:
        return 0  # makes rounds wait for it, unlike links of memory

    def readable(self) -> bool:
        return False


class Mute(MemoryNode):
    """A node that answers nothing."""

    def connect(self, timeout: float) -> MuteLink:
        return MuteLink(self, self.describe())


def test_blocking_round_ends_with_its_time(monkeypatch: pytest.MonkeyPatch):
    """Silent nodes keep no caller longer than one node timeout, to the millisecond."""
    now = 100.0

    def wait(connections: ConnectionSet, seconds: float) -> list[object]:
        nonlocal now
        now += seconds
        return []

    monkeypatch.setattr(
        ConnectionSet,
        "connection",
        lambda connections, connection: connections.by_node.update({connection.node: connection}),
    )
    monkeypatch.setattr(ConnectionSet, "read", wait)
    gather = Gather([Mute(name) for name in NAMES], admission(), lambda: now)
    round = round_of(0.5, needed=2)

    gather.ask(round)

    assert now == 100.5
    assert {(reply.kind, reply.detail) for reply in round.replies.values()} == {(Kind.UNKNOWN, "timeout")}


async def test_asyncio_round_ends_with_its_time():
    """The same for a task."""
    with Simulation(node_timeout=2.0) as sim:
        await lock("warm up").aacquire()
        for node in sim.nodes:
            node.silent = True
        began = sim.clock()

        with pytest.raises(QuorumUnavailableError):
            await lock("a", wait=0).aacquire()

        assert sim.clock() - began == pytest.approx(2.0, abs=0.001)


async def test_shorter_limit_is_noticed_before_a_longer_one():
    """A round with a shorter time limit does not wait for the timers of the rounds before it."""
    over: list[str] = []

    def passed(what: str, late: bool) -> bool:
        over.append(what)
        return True

    limits = TimeLimits(passed, steady)
    limits.add("long", 600.0)
    limits.add("short", 0.001)
    limits.add("as short", 0.001)

    await eventually(lambda: over == ["short", "as short"])

    limits.discard("long")
    limits.rest()


async def test_late_event_loop_does_not_use_up_a_time_limit(monkeypatch: pytest.MonkeyPatch):
    """A limit counts the time for which the event loop was served, and says so when that was too rarely."""
    loop, over, now = asyncio.get_running_loop(), [], 0.0
    monkeypatch.setattr(loop, "time", lambda: now)
    monkeypatch.setattr(loop, "call_at", lambda when, callback: Mock(when=when))  # the test lets the timers go off
    limits: TimeLimits[str] = TimeLimits(lambda what, late: not over.append((now, what, late)), lambda: now)
    limits.add("a", 0.4)

    for _ in range(3):  # on time, with a stall of ten seconds in between
        now += 0.05
        limits._look()
        now += 10.0
        limits._look()
    assert over == []
    while not over:
        now = limits._timers[0].when
        limits._look()
    assert over == [(pytest.approx(30.4), "a", False)]

    limits.add("b", 0.4)
    turns = 0
    while len(over) == 1:
        now += 10.0
        turns += 1
        limits._look()
    assert over[1][1:] == ("b", True)
    assert turns == pytest.approx(OWED / 0.05, abs=1)


def waits(patience: Patience, asked: float, late: float = 0.0) -> int:
    """Wait again and again, each time for a while longer than asked; return how often until the time is over."""
    count = 0
    while asked > 0:
        asked, count = patience.count(asked, asked + late), count + 1
    return count


@pytest.mark.parametrize(("late", "charged"), [(0.01, True), (0.2, False), (30.0, False)])
def test_wait_that_ends_late_is_not_charged_to_the_node(late: float, charged: bool):
    """A wait counts against a node only if this process had its turn when the wait was to end."""
    patience = Patience(0.5)

    assert waits(patience, 0.5 / SLICES, late) == (SLICES if charged else OWED / 0.5 * SLICES)
    assert patience.late is not charged


def test_wait_ends_with_the_lease_that_it_is_for():
    """A process that is always late does not wait for a reply that is of no use any more."""
    patience = Patience(0.8, 30.0)

    assert patience.count(0.1, 20.0)
    assert not patience.count(0.1, 20.0)
    assert patience.late


def test_wait_on_a_crowded_machine_is_not_charged_to_the_node(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Where threads wait for a processor, one of them may be the node's."""
    load = tmp_path / "loadavg"
    monkeypatch.setattr(clock, "LOAD", str(load))
    monkeypatch.setattr(clock, "CROWD", 3.0)

    for running, most in ((3, SLICES), (4, OWED / 0.1), (1, SLICES)):
        load.write_text(f"0.10 0.20 0.30 {running}/300 1234\n")
        patience = Patience(0.8)
        assert waits(patience, 0.1) == pytest.approx(most, abs=1)  # fifty times a tenth is a little less than five
        assert patience.late is (running == 4)


def test_connections_take_several_round_trips():
    """They get as many timeouts, up to a second and a half; nodes that failed lately get one, as releases mostly do."""
    breakers = Breakers(3)

    assert breakers.allowance(0.2, {0, 1}) == pytest.approx(1.2)
    assert breakers.allowance(0.5, {0, 1}) == 1.5
    assert breakers.allowance(7.0, {0, 1}) == 7.0

    assert breakers.allowance(0.2, {0}, cleanup=True) == pytest.approx(1.2)  # nobody knows how far the node is
    for took, most in ((0.01, 0.2), (0.3, 0.9), (5.0, 1.2)):
        breakers[0].linking = took
        assert breakers.allowance(0.2, {0}, cleanup=True) == pytest.approx(most)
    assert breakers.allowance(0.2, {0}) == pytest.approx(1.2)

    breakers[0].failed(now=100.0)
    assert breakers.allowance(0.2, {0, 1}) == pytest.approx(1.2)
    assert breakers.allowance(0.2, {0}) == 0.2

    patience = Patience(0.25, connecting=1.5)
    waited = 0.0
    while waited < 1.4:
        assert patience.count(0.02, 0.02, connecting=True)
        waited += 0.02
    assert patience.count(0.2, 0.2)
    assert not patience.count(0.2, 0.2)


def test_extension_does_not_wait_for_a_connection_that_has_failed_already(monkeypatch: pytest.MonkeyPatch):
    """A round that heals waits for connections that may come, not for one that was refused at once."""
    nodes = [MemoryNode(name) for name in NAMES]
    manager = LockManager(nodes, rules(3, **PATIENT))
    lease = manager.lock("a", renew=False).acquire()
    nodes[2].down = True
    monkeypatch.setattr(ConnectionSet, "read", lambda connections, seconds: pytest.fail(f"waits {seconds} s"))

    assert lease.extend()

    assert lease.release() == "released"


class Halting(MemoryNode):
    """A node that takes as long as a test wants to connect, and to answer."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.connects, self.answers = asyncio.Event(), asyncio.Event()

    async def aconnect(self, timeout: float) -> AsyncMemoryLink:
        await self.connects.wait()
        await asyncio.sleep(0)  # one turn, as the held replies need
        return HaltingLink(self)


class HaltingLink(AsyncMemoryLink):
    """Holds replies back."""

    def __init__(self, node: Halting) -> None:
        super().__init__(node.connect(1.0))
        self._node = node

    def send(self, request, packed, on_reply, *, in_full=False):
        def answer(_=None):
            super(HaltingLink, self).send(request, packed, on_reply)

        if self._node.answers.is_set():
            answer()
        else:
            asyncio.ensure_future(self._node.answers.wait()).add_done_callback(answer)


async def test_link_that_comes_with_the_deciding_vote():
    """A healing round is also sent to a node whose link arrives in the very turn that decides the round."""
    nodes = [Halting(name) for name in NAMES]
    gather = AsyncGather(nodes, admission(), Breakers(3), steady)
    round = round_of(30.0, needed=2, mending=True)

    for node in nodes[:2]:
        node.connects.set()
    nodes[0].answers.set()
    nodes[2].answers.set()
    asked = asyncio.create_task(gather.ask(round))
    await eventually(lambda: len(gather._lines) == 2 and len(round.replies) == 1)
    nodes[1].answers.set()  # the round learns of both in one turn, of the vote first
    nodes[2].connects.set()
    await asked

    assert {reply.kind for reply in (round.replies | round.late).values()} == {Kind.ACCEPTED}
    assert sorted(round.replies | round.late) == [0, 1, 2]
    await gather.aclose()


def test_late_end_of_a_try_to_connect_lets_nobody_in_beside_the_next():
    """The next try may begin when the time of the earlier one has run out, and then has its own time."""
    breaker = Breaker()
    breaker.failed(0.0)
    first = breaker.admits(0.0, 0.25)
    assert not breaker.admits(0.2, 0.25)
    second = breaker.admits(0.3, 0.25)

    breaker.was_tried(first)

    assert not breaker.admits(0.4, 0.25)
    breaker.was_tried(second)
    assert breaker.admits(0.4, 0.25)


class StackOfAThreadThatIsSlow(list):  # type: ignore[type-arg]
    """As soon as a connection set is put on it, another thread takes that set."""

    def append(self, connections: ConnectionSet) -> None:
        """Put it on, and have it taken."""
        super().append(connections)
        self.pop().close()


def test_connection_set_may_be_taken_at_once_by_another_thread(memory: Manager):
    """A lock that has been taken is not lost to an error about connections that others use by now."""
    manager = memory(3)
    manager.driver.gather.idle.sets = StackOfAThreadThatIsSlow()

    assert manager.lock("a", wait=0).acquire().release() == "released"


async def test_release_that_cannot_be_brought_is_forgotten_with_its_lease(
    memory: Manager, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
):
    """Redelivery to a node that stays away ends in time, and no thread is left."""
    monkeypatch.setattr(redelivery, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(redelivery, "LONGEST_PAUSE", 0.01)
    manager = memory(1, ttl=30.0)
    later = 0.0
    manager.driver.redelivery._clock = lambda: steady() + later
    lease = await flavour.acquire(manager.lock("a"))
    manager.nodes[0].down = True

    assert await flavour.release(lease) == "unknown"
    await eventually(lambda: len(manager.driver.redelivery) == 1)
    later = 31.0

    await eventually(lambda: not manager.driver.redelivery)
    await eventually(lambda: not manager.driver.redelivery._thread.running)
    await flavour.close(manager)
    manager.close()
