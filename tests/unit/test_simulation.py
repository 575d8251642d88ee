"""Users lose locks in their own tests, without a server and without waiting."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import time_machine

from django_redlock import Lease, LockLostError, LockTakenError, QuorumUnavailableError, lock, locks
from django_redlock.testing import OverlapError, Simulation

DOCS = Path(__file__).parents[2] / "docs" / "howto" / "testing.md"


def work(done: list[str]) -> None:
    """A function of a user's project under a lock."""
    with lock("report", ttl=10) as lease:
        done.append("read")
        lease.ensure()
        done.append("write")


def test_lock_is_lost_at_a_chosen_line():
    """
    The body continues where it was paused, checks its lease, and learns of the loss; by then a rival has the lock.
    """
    done: list[str] = []
    rivals: list[Lease] = []

    with Simulation() as sim, sim.at(work, "lease.ensure()", lambda: rivals.append(sim.lose("report"))):
        with pytest.raises(LockLostError, match="ran out before it could be extended"):
            work(done)

        assert rivals[0].valid()
        assert sim.overlaps == []
    assert done == ["read"]


def test_lines_of_several_functions_are_watched_at_once():
    """Each action runs at its line, in one function or in one that it calls, and no longer than its block is open."""
    seen: list[Any] = []

    def outer() -> None:
        first = "first"
        work(seen)
        last = "last"
        seen.append(first + last)

    with Simulation() as sim, sim.at(outer, 'first = "first"', lambda: seen.append("at first")):
        with sim.at(work, "lease.ensure()", lambda: seen.append("at ensure")):
            with sim.at(outer, 'last = "last"', lambda: seen.append("at last")):
                outer()
        outer()

    assert seen == ["at first", "read", "at ensure", "write", "at last", "firstlast", "read", "write", "firstlast"]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('done.append("write")', AssertionError, r"work did not reach the line with 'done.append\(\"write\"\)'"),
        ("done.append", ValueError, "work has 2 lines with 'done.append'"),
        ("delete", ValueError, "work has 0 lines with 'delete'"),
    ],
)
def test_line_must_be_clear_and_reached(text: str, error: type[Exception], message: str):
    """A test that never reached the point proves nothing."""
    with Simulation() as sim, pytest.raises(error, match=message):
        with sim.at(work, text, print):
            pass


def test_rival_waits_and_is_waited_for_in_virtual_time():
    """A caller gets the lock when the holder ends, or when the lease of a holder that was killed has ended."""
    with Simulation(ttl=30) as sim:
        rival = sim.rival()
        lease = rival.lock("report").acquire()
        sim.after(100, lease.release)
        began = sim.clock()

        with lock("report", wait=200):
            assert 100 <= sim.clock() - began < 101
        with pytest.raises(LockTakenError), rival.lock("report"):
            lock("report", wait=5).acquire()
        rival.lock("report").acquire()
        rival.kill()
        began = sim.clock()
        with lock("report", wait=None):
            assert 28 < sim.clock() - began < 32


def test_nodes_fail_and_come_back():
    """One of three nodes may be down, two may not, and a node that forgot gives no vote for a while."""
    with Simulation() as sim:
        sim.nodes[0].crash()
        lock("a").acquire().release()
        sim.nodes[1].crash()
        with pytest.raises(QuorumUnavailableError):
            lock("a", wait=0).acquire()

        sim.nodes[1].start(keep_data=False)
        with pytest.raises(QuorumUnavailableError, match="restarted"):
            lock("a", wait=0).acquire()
        sim.advance(70)
        lock("a", wait=0).acquire().release()


def test_replies_and_releases_that_are_lost():
    """An attempt without replies fails and blocks nothing; a node that was down gets a release later."""
    with Simulation() as sim:
        lock("warm").acquire().release()
        for node in sim.nodes[:2]:
            node.drop_next_reply()
        with pytest.raises(QuorumUnavailableError):
            lock("a", wait=0).acquire()
        sim.advance(5)
        lease = sim.rival().lock("a", wait=0).acquire()

        sim.nodes[0].crash()
        lease.release()
        assert sim.nodes[0].store.records.holders
        sim.nodes[0].start()
        sim.advance(5)

        assert not sim.nodes[0].store.records.holders


@pytest.mark.parametrize(
    ("held", "wanted"), [({}, {}), ({}, {"limit": 2}), ({"limit": 2}, {"limit": 3}), ({"limit": 2}, {"shared": True})]
)
def test_overlap_is_found(held: dict[str, Any], wanted: dict[str, Any]):
    """Two of three clocks that run forward break the lock's assumptions; the check at the end reports it."""
    sim = Simulation()
    with sim:
        lock("report", **held).acquire()
        for node in sim.nodes[:2]:
            node.step_clock(3600)
        sim.rival().lock("report", wait=0, **wanted).acquire()
        overlaps, sim.overlaps = sim.overlaps, []

    assert overlaps == ["'report' was granted to rival 1 while this process had it."]
    sim.overlaps = overlaps
    with pytest.raises(OverlapError, match="'report' was granted to rival 1 while this process had it"), sim:
        pass


def test_overlap_is_not_found_where_there_is_none():
    """One clock that runs forward costs a vote, and no more; shared holders and permits are no overlap."""
    with Simulation() as sim:
        held = lock("report").acquire()
        sim.nodes[0].step_clock(3600)
        with pytest.raises((LockTakenError, QuorumUnavailableError)):
            sim.rival().lock("report", wait=0).acquire()
        assert held.valid()
        for _ in range(2):
            sim.rival().lock("pages", shared=True).acquire()
            sim.rival().lock("two", limit=2).acquire()

        assert sim.overlaps == []


async def test_event_loop_runs_in_virtual_time():
    """A task that sleeps or waits lets time pass; leases are renewed on the way, and timers come in order."""
    came: list[str] = []

    with Simulation(ttl=30) as sim:
        began = sim.clock()
        async with lock("report") as lease:
            asyncio.get_running_loop().call_later(50, came.append, "timer")
            sim.after(40, lambda: came.append("event"))
            await asyncio.sleep(100)
            assert lease.valid()
            assert 100 <= sim.clock() - began < 101
        rival = sim.rival(ttl=20).lock("report").acquire()
        sim.after(50, rival.release)
        async with lock("report", wait=100):
            assert 150 <= sim.clock() - began < 152
        sim.rival().lock("report").acquire()
        with pytest.raises(LockTakenError):
            await lock("report", wait=30).aacquire()
        assert 180 <= sim.clock() - began < 184

    assert came == ["event", "timer"]
    assert rival.ttl == 20


async def test_timers_of_an_event_loop_that_goes_on_keep_what_they_have_left():
    """A loop that tests share gets its real time back after the block, and nothing in it waits for the virtual time."""
    loop, soon = asyncio.get_running_loop(), asyncio.Event()
    later = loop.call_later(2000, print)

    with Simulation(ttl=30):
        async with lock("report"):
            await asyncio.sleep(1800)
        loop.call_later(0.001, soon.set)

    assert 190 < later.when() - loop.time() <= 200
    assert await asyncio.wait_for(soon.wait(), 30)
    later.cancel()


async def test_event_loop_without_timers_waits_for_planned_events_and_other_threads():
    """A task gets at once what the test planned; without a planned event, a thread may wake its loop."""
    with Simulation() as sim:
        loop = asyncio.get_running_loop()
        sim.adopt(loop)
        sim.adopt(object())  # one that is not written in Python has no selector, and keeps its time
        planned, elsewhere, began = loop.create_future(), loop.create_future(), sim.clock()
        threading.Thread(target=loop.call_soon_threadsafe, args=(elsewhere.set_result, "done")).start()
        assert await elsewhere == "done"
        assert sim.clock() - began < 1

        sim.after(1000, lambda: planned.set_result("done"))

        assert await planned == "done"


async def test_time_is_real_while_a_thread_works_for_the_event_loop():
    """Nobody knows how long the thread needs, so no lock that is held meanwhile ends because of it."""
    free = threading.Event()

    with Simulation(ttl=30) as sim:
        async with lock("report") as lease:
            working = asyncio.create_task(asyncio.to_thread(free.wait, 30))
            await asyncio.sleep(0)
            before = sim.clock()
            asyncio.get_running_loop().call_later(0.001, free.set)

            assert await working

            assert sim.clock() - before < 30
            assert lease.valid()


def test_event_loops_may_begin_and_end_in_a_simulation():
    """``asyncio.run()`` in the block ends its threads without waiting in virtual time for them."""

    async def work() -> bool:
        async with lock("report") as lease:
            await asyncio.sleep(100)
            return await asyncio.to_thread(lease.valid)

    with Simulation(ttl=30):
        assert asyncio.run(work())
        assert asyncio.run(work())


def test_other_aliases_keep_their_nodes_and_the_real_time(settings: Any):
    """Only the alias is simulated; a lock of another one is taken, renewed and released as always."""
    settings.REDLOCK = {**settings.REDLOCK, "other": {"NODES": ["memory://elsewhere"], "OPTIONS": {"ttl": 30}}}
    with Simulation(ttl=10) as sim, lock("a", using="other") as real:
        simulated = lock("a").acquire()
        sim.pause(60)

        assert (simulated.valid(), real.valid()) == (False, True)
        assert 29 < real.remaining() < 30


@lock("nightly", wait=0)
def nightly() -> str:
    """Run under a lock that lives as long as its module."""
    return "done"


def test_lock_of_a_module_is_that_of_each_simulation():
    """A decorated function that ran before takes part in a simulation, in the next one, and not after them."""
    assert nightly() == "done"
    for _ in range(2):
        with Simulation() as sim:
            assert nightly() == "done"
            sim.rival().lock("nightly").acquire()
            with Simulation():
                assert nightly() == "done"
            with pytest.raises(LockTakenError):
                nightly()
    assert nightly() == "done"


def test_settings_may_change_in_a_simulation(settings: Any):
    """The alias stays simulated; its locks have the new settings when the simulation ends."""
    before = locks["default"]
    with Simulation() as sim:
        sim.rival().lock("nightly").acquire()
        settings.REDLOCK = {"default": {"NODES": ["memory://b"], "OPTIONS": {"ttl": 7}}}
        with pytest.raises(LockTakenError):
            nightly()
    assert nightly() == "done"

    assert locks["default"] is not before
    assert lock("a").acquire().ttl == 7


@pytest.mark.parametrize(("quorum", "nodes", "simulated"), [(4, 5, 5), (1, 1, 1), (None, 1, 3), (3, 5, 5)])
def test_simulation_has_nodes_for_the_quorum_of_the_project(settings: Any, quorum: Any, nodes: int, simulated: int):
    """A quorum that the project chooses is one of as many nodes as the project has; without one there are three."""
    urls = ",".join(f"memory://{number}" for number in range(nodes))
    settings.REDLOCK = {"default": {"NODES": urls, "OPTIONS": {"quorum": quorum}}}

    with Simulation() as sim:
        assert (len(sim.nodes), sim.rules.needed) == (simulated, quorum or 2)
    with Simulation(nodes=4, quorum=3) as sim:
        assert (len(sim.nodes), sim.rules.needed) == (4, 3)


def test_simulation_restores_nodes_and_time(settings: Any):
    """After the block the alias has its own nodes, and time is real."""
    before = lock("a").acquire()
    with Simulation() as sim:
        lock("a", wait=0).acquire()
        sim.advance(1000)

    assert before.valid()
    assert before.release() == "released"


@pytest.mark.parametrize("today", ["2026-01-31", "2035-01-31"])
def test_fencing_tokens_increase_from_simulation_to_simulation_and_around_them(today: str):
    """Rows of a database remember the token of the last holder; code may use them in, between and after simulations."""
    tokens: list[int] = []

    def take() -> None:
        with lock("a", wait=0) as lease:
            tokens.append(lease.fencing_token)

    with time_machine.travel(today):
        for _ in range(2):
            with Simulation() as sim:
                take()
                sim.advance(3600)
                take()
            take()

    assert len(tokens) == 6
    assert tokens == sorted(set(tokens))


@pytest.mark.server
def test_example_in_the_docs_works(tmp_path: Path):
    """The example is run unchanged, by pytest, with the fixture of the plugin."""
    blocks = DOCS.read_text().split("```python\n")[1:]
    (example,) = [block.split("```")[0] for block in blocks if "redlock_simulation" in block]
    module, test = example.split("# test_invoices.py\n")
    (tmp_path / "invoices.py").write_text(module)
    (tmp_path / "test_invoices.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "no:redlock", "-p", "django_redlock.testing.plugin", "-q"]
    command += ["--ds=tests.settings", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([str(tmp_path), *sys.path, root])

    ran = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout
