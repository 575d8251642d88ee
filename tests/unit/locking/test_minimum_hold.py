"""``hold_for``: a lock stays taken for a minimum time, whatever becomes of its holder; in virtual time."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import datetime
from typing import Any

import pytest
from django.conf import settings
from django.db import transaction
from django.test import override_settings

from django_redlock import LockLostError, LockTakenError, lock, locks
from django_redlock.core.protocol import Extend
from django_redlock.engine.reentrancy import OpenBlocks
from django_redlock.inventory import ActionResult, ask_to_stop, force_release, held_locks, stale_keys
from django_redlock.signals import lock_acquired
from django_redlock.testing import Simulation
from tests.held import found, look, run

TTL = 10.0
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several names": {},
    "shared": {"shared": True},
    "one permit of two": {"limit": 2},
    "sent release": {"release": "send"},
    "not renewed": {"renew": False},
}


@pytest.fixture
def sim() -> Iterator[Simulation]:
    with Simulation(ttl=TTL) as simulation:
        yield simulation


def is_taken(sim: Simulation, name: str = "tick") -> bool:
    """Return whether a process that wants the lock alone finds it taken."""
    lease = sim.rival().lock(name, wait=0).try_acquire()
    if lease:
        lease.release()
    return lease is None


def taken_until(sim: Simulation, name: str = "tick") -> float:
    """Return when a process that waits for the lock gets it."""
    with sim.rival().lock(name, wait=None):
        return sim.clock()


@pytest.mark.parametrize("hold_for", [3.0, 100.0], ids=["less than the lease", "more than max_ttl"])
@pytest.mark.parametrize("work", [0.0, 1.0, 2.9])
@pytest.mark.parametrize("kind", KINDS)
def test_lock_stays_taken_for_its_minimum_hold(sim: Simulation, kind: str, work: float, hold_for: float):
    """It counts from the acquisition, for every kind of lock; whoever waits gets the lock when it has passed."""
    names = ["tick", "tock"] if kind == "several names" else "tick"
    work *= hold_for / 3 if kind != "not renewed" else 1.0
    began = sim.clock()

    with lock(names, hold_for=hold_for, **KINDS[kind]) as lease:
        sim.advance(work)
        assert lease.valid()

    assert began + hold_for <= taken_until(sim) <= began + hold_for + 1.1
    assert not is_taken(sim, "tock")


@pytest.mark.parametrize("hold_for", [0.0, 3.0, 30.0])
def test_work_that_is_longer_frees_the_lock_at_its_end(sim: Simulation, hold_for: float):
    with lock("tick", hold_for=hold_for) as lease:
        sim.advance(40)

    assert not is_taken(sim)
    assert lease.release() == "released"


@pytest.mark.parametrize("limit", [1, 2])
def test_next_waiter_gets_the_lock_when_a_hold_ends_that_was_waited_for(sim: Simulation, limit: int):
    """The holder has left the queue by then, however short its hold is."""
    first = sim.rival().lock("tick").acquire()
    sim.after(5, first.release)
    with sim.rival().lock("tick", wait=None, hold_for=0.5, limit=limit):
        began = sim.clock()

    assert began + 0.5 <= taken_until(sim) <= began + 0.6


@pytest.mark.parametrize("after", [0.0, 25.0], ids=["at once", "in the middle of the work"])
def test_process_that_dies_leaves_the_lock_taken(sim: Simulation, after: float):
    """The nodes know of the minimum hold before the work begins, so a kill at any moment of it shortens nothing."""
    cron = sim.rival()
    cron.lock("tick", hold_for=100).acquire()
    began = sim.clock()
    sim.advance(after)

    cron.kill()

    assert began + 100 <= taken_until(sim) <= began + 101.1


def test_process_that_dies_after_the_minimum_hold_leaves_its_lease(sim: Simulation):
    """Then the lock ends as any does, within one ttl."""
    cron = sim.rival()
    cron.lock("tick", hold_for=30).acquire()
    sim.advance(50)

    cron.kill()

    assert taken_until(sim) <= sim.clock() + TTL + 1.1


def test_two_hosts_run_each_tick_once(sim: Simulation):
    """Two hosts start a job of one second for each of 200 minutes, and the clock of one is two seconds slow."""
    runs: list[tuple[int, str]] = []
    hosts = [sim.rival("fast"), sim.rival("slow")]

    def start(host: Any, tick: int) -> None:
        if lease := host.lock("job", wait=0, hold_for=50).try_acquire():
            runs.append((tick, host.name))
            sim.after(1, lease.release)

    for tick in range(200):
        for late, host in enumerate(hosts):
            sim.after(60 * tick + 2 * late, lambda host=host, tick=tick: start(host, tick))
    sim.advance(200 * 60)

    assert [tick for tick, _ in runs] == list(range(200))


@pytest.mark.parametrize("hold_on_error", [True, False])
@pytest.mark.parametrize("how", ["with", "with a lease", "async with"])
def test_failure_keeps_the_lock_unless_the_caller_says_otherwise(sim: Simulation, how: str, hold_on_error: bool):
    """A job that fails is not run again by the next host, as for tasks; a caller may choose that it is."""
    described = lock("tick", hold_for=30, hold_on_error=hold_on_error)

    async def afail() -> None:
        async with described:
            raise ZeroDivisionError

    def fail() -> None:
        with described if how == "with" else described.acquire():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(afail()) if how == "async with" else fail()

    assert is_taken(sim) is hold_on_error


def test_body_that_did_not_begin_leaves_nothing(sim: Simulation):
    """A receiver of ``lock_acquired`` that fails keeps the work from beginning, so another host may do it."""

    def receive(**about: Any) -> None:
        raise KeyboardInterrupt

    lock_acquired.connect(receive)
    try:
        with pytest.raises(KeyboardInterrupt), lock("tick", hold_for=30):
            pytest.fail("the body ran")
    finally:
        lock_acquired.disconnect(receive)

    assert not is_taken(sim)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("within", [False, True], ids=["alone", "in an outer block"])
def test_call_that_its_transaction_refuses_leaves_nothing(within: bool):
    """The job was not done, so its next call does it; of a reentrant lock, the outer block keeps its minimum hold."""
    calls: list[str] = []
    redlock = {**settings.REDLOCK["default"], "OPTIONS": {"in_transaction": "error"}}
    job = lock("tick", hold_for=50, reentrant=True, if_taken="skip")(lambda: calls.append("ran"))
    with override_settings(REDLOCK={"default": redlock}), Simulation(ttl=TTL) as sim:
        with lock("tick", hold_for=30, reentrant=True) if within else nullcontext():
            with transaction.atomic(), pytest.raises(RuntimeError, match="inside a transaction"):
                job()

        assert calls == []
        assert is_taken(sim) is within
        if not within:
            job()
            assert calls == ["ran"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_inner_block_that_did_not_begin_leaves_the_hold_of_the_outer_one(sim: Simulation, asynchronous: bool):
    """A block of a reentrant lock that is interrupted before its body begins has nothing to take back."""
    described = lock("tick", hold_for=30, reentrant=True)
    interrupt = pytest.MonkeyPatch()

    def enter(*about: Any) -> None:
        raise KeyboardInterrupt

    async def aenter() -> None:
        async with described:
            interrupt.setattr(OpenBlocks, "enter", enter)
            with pytest.raises(KeyboardInterrupt):
                async with described:
                    pytest.fail("the body ran")

    try:
        if asynchronous:
            asyncio.run(aenter())
        else:
            with described:
                interrupt.setattr(OpenBlocks, "enter", enter)
                with pytest.raises(KeyboardInterrupt), described:
                    pytest.fail("the body ran")
    finally:
        interrupt.undo()

    assert is_taken(sim)


def test_release_says_that_the_lock_is_still_taken(sim: Simulation):
    """The lease has ended; a second release returns the same, and later holders have a greater token than the run."""
    lease = lock("tick", hold_for=30, label="nightly").acquire()

    assert (lease.release(), lease.release(), lease.reason) == ("held", "held", "released")

    assert not lease.valid()
    assert found("tick").fencing_token == lease.fencing_token
    with pytest.raises(LockTakenError, match=r"held by manual nightly \(held\)") as taken:
        sim.rival().lock("tick", wait=0).acquire()
    assert 29 < (taken.value.retry_after or 0) <= 30
    assert sim.rival().lock("tick", wait=None).acquire().fencing_token > lease.fencing_token


def test_lease_ends_as_any_other_and_the_lock_stays_taken(sim: Simulation):
    """The minimum hold says nothing about who works: a lease that is not renewed, or reaches max_hold, is lost."""
    began = sim.clock()
    with pytest.raises(LockLostError) as paused, lock("tick", hold_for=100):
        sim.pause(TTL + 1)
    assert paused.value.reason == "expired"
    assert began + 100 <= taken_until(sim) <= began + 101.1

    began = sim.clock()
    with pytest.raises(LockLostError) as long, lock("tock", hold_for=100, max_hold=15):
        sim.advance(30)
    assert long.value.reason == "max_hold"
    assert began + 100 <= taken_until(sim, "tock") <= began + 101.1


def test_extension_to_a_shorter_lease_does_not_end_the_minimum_hold(sim: Simulation):
    began = sim.clock()
    lease = lock("tick", hold_for=100, renew=False).acquire()

    assert lease.extend(ttl=9)
    assert lease.remaining() < 9
    assert lease.extend(ttl=20)
    assert 19 < lease.remaining() < 20
    lease.release()

    assert began + 100 <= taken_until(sim) <= began + 101.1


def test_node_that_lost_the_lock_gets_it_back_for_the_whole_hold(sim: Simulation):
    """While the work lasts, renewal restores it, on one node after the other; afterwards its process may be killed."""
    cron = sim.rival()
    cron.lock("tick", hold_for=200).acquire()
    began = sim.clock()
    for node in sim.nodes[:2]:
        node.restart()
        sim.advance(70)
    cron.kill()

    assert began + 200 <= taken_until(sim) <= began + 201.1


def test_hold_that_was_lost_is_not_brought_back(sim: Simulation):
    """The nodes have forgotten it, and its lease has ended by then: somebody else may have had the lock since."""
    with pytest.raises(LockLostError), lock("tick", hold_for=200):  # noqa: PT012
        sim.pause(TTL + 1)
        for node in sim.nodes:
            node.restart()

    assert look("tick") is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_end_of_the_work_reports_that_another_holder_has_the_lock(asynchronous: bool):
    """The nodes have lost their memory before the next renewal, and say so only to a new connection."""
    with Simulation(ttl=TTL, restart_guard=False, check=False) as sim:

        def forget() -> None:
            for node in sim.nodes:
                node.store.reset()
            others.append(sim.rival().lock("tick", wait=0).acquire())

        async def work() -> None:
            async with lock("tick", hold_for=100):
                forget()

        def blocking_work() -> None:
            with lock("tick", hold_for=100):
                forget()

        others: list[Any] = []
        with pytest.raises(LockLostError, match="tick"):
            asyncio.run(work()) if asynchronous else blocking_work()
        assert others[0].release() == "released"


@pytest.mark.parametrize("node", range(3))
def test_one_node_of_three_may_fail_during_the_hold(sim: Simulation, node: int):
    began = sim.clock()
    lock("tick", hold_for=30).acquire().release()

    sim.nodes[node].crash()

    assert began + 30 <= taken_until(sim) <= began + 31.1


def test_node_that_is_away_at_the_end_of_the_work_keeps_the_lock_for_one_lease_at_most(sim: Simulation):
    """Only the extension of the lease that it has seen last outlasts the hold there."""
    began = sim.clock()
    with lock("tick", hold_for=3):
        sim.advance(2)
        sim.nodes[0].down = sim.nodes[1].down = True
    sim.nodes[0].down = sim.nodes[1].down = False

    assert began + 3 <= taken_until(sim) <= began + 2 + TTL + 1.1


@pytest.mark.parametrize("when", ["during the work", "during the hold"])
def test_operator_ends_it(sim: Simulation, when: str):
    """A run learns of it; after that, nothing of the run keeps the lock taken."""
    lease = lock("tick", hold_for=100).acquire()
    if when == "during the hold":
        lease.release()

    assert force_release("tick", found("tick").fingerprint) is ActionResult.RELEASED

    sim.advance(TTL)
    assert lease.reason == ("revoked" if when == "during the work" else "released")
    lease.release()
    assert not is_taken(sim)


def test_lock_that_an_operator_freed_may_be_that_of_the_next_holder():
    """The end of the run finds that one, which counts for more than who freed the lock."""
    with Simulation(ttl=TTL, check=False) as sim:
        lease = lock("tick", hold_for=100).acquire()
        force_release("tick", found("tick").fingerprint)
        following = sim.rival().lock("tick").acquire()

        assert (lease.release(), lease.reason) == ("taken", "superseded")
        assert following.release() == "released"


def test_inner_blocks_of_a_reentrant_lock_change_nothing(sim: Simulation):
    """The hold is that of the outermost block; the failure of an inner one is not the end of the work."""
    began = sim.clock()
    outer = lock("tick", reentrant=True, hold_for=30, hold_on_error=False)
    with outer:
        with pytest.raises(ZeroDivisionError), lock("tick", reentrant=True, hold_for=100):
            raise ZeroDivisionError

    assert began + 30 <= taken_until(sim) <= began + 31.1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("within", [True, False], ids=["with an inner block", "alone"])
def test_failure_of_the_outermost_block_frees_the_lock_after_the_transaction(within: bool):
    """Also if an inner block is over, whose entry is given back at the commit."""
    described = lock("tick", reentrant=True, on_commit=True, hold_for=30, hold_on_error=False)
    with Simulation(ttl=TTL) as sim:
        with pytest.raises(ZeroDivisionError), transaction.atomic(), described:  # noqa: PT012
            with described if within else nullcontext():
                pass
            raise ZeroDivisionError

        assert not is_taken(sim)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("begins", [True, False])
def test_next_outermost_block_of_a_transaction_decides_anew(monkeypatch: Any, begins: bool):
    """
    A block that failed, and whose error was caught, gives up the hold. One that succeeds after it has it, and one that
    does not begin changes nothing.
    """
    described = lock("tick", reentrant=True, on_commit=True, hold_for=30, hold_on_error=False)

    def interrupt(*about: Any) -> None:
        raise KeyboardInterrupt

    with Simulation(ttl=TTL) as sim:
        with transaction.atomic():
            with suppress(ZeroDivisionError), described:
                raise ZeroDivisionError
            with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                if not begins:
                    patch.setattr(OpenBlocks, "enter", interrupt)
                with described:
                    pass

        assert is_taken(sim) is begins


async def test_minimum_hold_in_an_event_loop():
    with Simulation(ttl=TTL) as sim:
        began = sim.clock()
        async with lock("tick", hold_for=100) as lease:
            await asyncio.sleep(20)
        assert await lease.arelease() == "held"

        async with lock("tick", wait=None):
            assert began + 100 <= sim.clock() <= began + 101.1


@pytest.mark.parametrize("away", range(3))
def test_lists_say_until_when_it_is_held(sim: Simulation, away: int):
    """
    Not as a lock that somebody renews: until when it stays taken, and that its work is over. It makes no difference
    that its process dies, or that a node was away and knows only of the work.
    """
    cron = sim.rival()
    lease = cron.lock("tick", hold_for=160, label="nightly").acquire()
    sim.nodes[away].down = True
    lease.release()
    sim.advance(10)
    sim.nodes[away].down = False
    cron.kill()
    sim.advance(50)

    held = found("tick")
    assert (held.state, held.remaining) == ("held", pytest.approx(100, abs=0.1))
    until = re.compile(f"held until ([0-9-]+ )?{datetime.fromtimestamp(held.kept_until):%H:%M:%S}")  # today, as a rule
    lines = [run("redlock_list", "--wide")[0].split("\n")[1], run("redlock_top", "--once", "--wide")[0].split("\n")[-2]]
    for line in lines:
        assert until.search(line)
        assert "manual nightly (held) on" in line
    shown = run("redlock_inspect", "tick")[0]
    assert until.search(shown)
    assert "nobody renews it" in shown


@pytest.mark.parametrize("noticed", [True, False], ids=["the holder stops", "the work ends before it knows"])
@pytest.mark.parametrize("kind", ["plain", "several names", "one permit of two"])
def test_hold_of_a_holder_that_was_asked_to_stop_is_nobodys(sim: Simulation, kind: str, noticed: bool):
    """It has stopped, so no list says that it works on, and an operator need not ask again."""
    names = ["tick", "tock"] if kind == "several names" else "tick"
    lease = lock(names, hold_for=100, **KINDS[kind]).acquire()
    asked = held_locks().locks[0]
    assert ask_to_stop(asked, asked.fingerprint) is ActionResult.ASKED
    if noticed:
        sim.advance(TTL)
        assert lease.reason == "revoked"

    lease.release()

    for held in held_locks().locks:
        assert (held.state, held.kept_until is None) == ("held", False)
        assert ask_to_stop(held, held.fingerprint) is ActionResult.UNRENEWED
    assert is_taken(sim)


@pytest.mark.parametrize("noticed", [True, False], ids=["the holder stops", "the work ends before it knows"])
def test_hold_of_several_names_goes_on_without_the_one_that_was_released(sim: Simulation, noticed: bool):
    """Nobody works under the others any more, and lists say so."""
    lease = lock(["tick", "tock"], hold_for=100).acquire()
    force_release("tock", found("tock").fingerprint)
    if noticed:
        sim.advance(TTL)

    assert (lease.release(), lease.reason) == ("expired", "revoked")

    (held,) = held_locks().locks
    assert (held.name, held.kept_until > 0) == ("tick", True)
    assert ask_to_stop(held, held.fingerprint) is ActionResult.UNRENEWED


@pytest.mark.parametrize("hold_for", [3.0, 100.0])
def test_extension_that_arrives_after_the_work_does_not_bring_the_holder_back(sim: Simulation, hold_for: float):
    """Another thread had sent it; the lock is nobody's all the same, and stays taken no longer than asked for."""
    began = sim.clock()
    lease = lock("tick", hold_for=hold_for, renew=False).acquire()
    node = sim.nodes[0]
    execute = node.execute

    def after_the_work(request: Any, *about: Any) -> Any:
        if isinstance(request, Extend) and not request.terms[0].last:
            node.execute = execute
            assert lease.release() == "held"
        return execute(request, *about)

    node.execute = after_the_work
    assert not lease.extend()
    sim.advance(0.5)

    assert found("tick").kept_until > 0
    assert began + hold_for <= taken_until(sim) <= began + hold_for + 1.1


def test_extension_that_arrives_late_leaves_a_later_hold_with_the_same_secret_alone(sim: Simulation):
    """A caller that chooses its secret may hold the lock again before the replies to the extension come."""
    chosen = locks["default"].on_behalf
    lease = chosen("tick", secret="a" * 32, hold_for=3.0, renew=False, wait=0).acquire()
    node, later = sim.nodes[0], []
    execute = node.execute

    def after_the_next_acquisition(request: Any, *about: Any) -> Any:
        if isinstance(request, Extend) and not request.terms[0].last:
            node.execute = execute
            lease.release()
            later.append(chosen("tick", secret="a" * 32, renew=False, wait=0).acquire())
        return execute(request, *about)

    node.execute = after_the_next_acquisition
    lease.extend()
    sim.advance(5)

    assert later[0].valid()
    assert is_taken(sim)


def test_hold_of_several_names_is_asked_for_once(sim: Simulation):
    """Where no name was lost, nothing is left to describe."""
    asked = []
    execute = sim.nodes[0].execute
    lease = lock(["tick", "tock"], hold_for=100).acquire()
    sim.nodes[0].execute = lambda request, *about: asked.append(request) or execute(request, *about)

    assert lease.release() == "held"
    sim.advance(1.0)

    assert sum(isinstance(request, Extend) for request in asked) == 1


def test_hold_of_several_names_of_which_another_holder_has_one():
    """The end of the work says who has it, though another name is only lost."""
    with Simulation(ttl=TTL, restart_guard=False, check=False) as sim:
        lease = lock(["tick", "tock"], hold_for=100).acquire()
        for node in sim.nodes:
            node.store.reset()
        sim.rival().lock("tock", label="nightly", wait=0).acquire()

        assert (lease.release(), lease.reason) == ("taken", "superseded")
        assert "nightly" in lease.hold.successor


@pytest.mark.parametrize(("work", "rate"), [(3568, 0.009), (86_360, 0.0005)])
def test_hold_that_slow_clocks_prolong_is_not_stale(work: float, rate: float):
    """The nodes count it, and their clocks may be slower than that of the holder's host."""
    with Simulation(max_hold=1e6) as sim:
        with lock("tick", hold_for=work + 32):
            for _ in range(60):
                sim.advance(work / 60)
                for node in sim.nodes:
                    node.step_clock(-work / 60 * rate)

        assert stale_keys(held_locks()) == []


@pytest.mark.parametrize("over", [True, False], ids=["over", "killed"])
def test_key_of_a_minimum_hold_is_never_stale(sim: Simulation, over: bool):
    """redlock_clear deletes what no lease needs; the hold of a run that is over, or was killed, is needed."""
    cron = sim.rival()
    lease = cron.lock("tick", hold_for=3600).acquire()
    if over:
        lease.release()
    cron.kill()
    sim.advance(1000)

    snapshot = held_locks()
    assert [(lock.name, lock.state) for lock in snapshot.locks] == [("tick", "held" if over else "orphaned")]
    assert stale_keys(snapshot) == []


@pytest.mark.parametrize("wrong", [-1, "60", float("inf"), True, None])
def test_hold_that_is_no_number_of_seconds_is_refused(wrong: Any):
    with pytest.raises(ValueError, match="hold_for must be a number of seconds from 0"):
        lock("tick", hold_for=wrong)
