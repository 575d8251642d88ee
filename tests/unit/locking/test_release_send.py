"""Releases that are sent without waiting for the replies, in virtual time."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.test import RequestFactory

from django_redlock import InvalidRedlockError, LockLostError, lock, locks
from django_redlock.signals import lock_lost, lock_released
from django_redlock.testing import Simulation
from django_redlock.views import locked_view
from tests.held import held_by
from tests.managers import Flavour

TIMEOUT = 0.25  # seconds: the node timeout of these locks
LONG = TIMEOUT + 0.1  # seconds after which the replies have been read, if they came


@pytest.fixture
def outcomes() -> Iterator[list[str]]:
    """The outcomes of the releases, as the signal reports them."""
    found: list[str] = []

    def note(sender: Any, outcome: str, **about: Any) -> None:
        found.append(str(outcome))

    lock_released.connect(note)
    yield found
    lock_released.disconnect(note)


def simulation(**options: Any) -> Simulation:
    return Simulation(node_timeout=TIMEOUT, **options)


def silence(sim: Simulation, *nodes: int) -> None:
    for node in nodes:
        sim.nodes[node].silent = True


# What the lock, the settings and the place decide


@pytest.mark.parametrize(
    ("passed", "option", "kind", "sends"),
    [
        (None, None, "manual", False),
        (None, None, "task", True),
        (None, None, "view", True),
        (None, "wait", "task", False),
        (None, "send", "manual", True),
        ("wait", "send", "view", False),
        ("send", "wait", "manual", True),
    ],
)
def test_what_decides_how_the_release_goes(passed: Any, option: Any, kind: Any, sends: bool):
    """The lock decides, then the settings; otherwise only the end of a task's run or of a view sends its release."""
    with simulation(release=option):
        with held_by("a", kind, release=passed).acquire() as lease:
            assert lease.hold.waits_at_end is not sends


@pytest.mark.parametrize("value", ["later", True])
def test_other_values_are_refused(value: Any, settings: Any):
    """The error names the option, the value and what to write instead."""
    message = f"release must be 'wait', 'send' or None, not {value!r}"
    settings.REDLOCK = {"default": {"NODES": "memory://a", "OPTIONS": {"release": value}}}

    with pytest.raises(InvalidRedlockError, match=message):
        locks["default"]
    with pytest.raises(ValueError, match=message):
        lock("a", release=value)


# The outcome


async def test_block_ends_while_the_nodes_are_silent(outcomes: list[str], flavour: Flavour):
    """The end of the block takes no time; the outcome is known after the node timeout."""
    with simulation() as sim:
        async with flavour.entered(lock("a", release="send")):
            silence(sim, 0, 1, 2)
            began = sim.clock()

        assert (sim.clock() - began < 0.001, outcomes) == (True, [])
        await flavour.pass_time(sim, LONG)

        assert outcomes == ["unknown"]


@pytest.mark.parametrize(
    ("names", "options"), [(["a", "b", "c"], {"reentrant": True}), ("b", {"shared": True}), ("b", {"limit": 3})]
)
def test_every_kind_of_lock_is_released(outcomes: list[str], names: Any, options: Any):
    """Shared locks, permits and several names are freed on every node, and instant nodes leave nothing to wait for."""
    with simulation() as sim:
        with lock(names, release="send", **options):
            pass

        assert (outcomes, len(locks["default"].driver.unattended)) == (["released"], 0)
        assert lock(names, **options).acquire().release(wait=False) == "released"
        assert lock(names, wait=0, **options).acquire().release() == "released"
        assert not any(node.store.records.holders for node in sim.nodes)


def test_lock_that_the_nodes_had_lost_is_reported(outcomes: list[str], caplog: pytest.LogCaptureFixture):
    """The lease was valid by its own clock, so the block raises nothing; the log and the signal report the loss."""
    losses: list[Any] = []
    lock_lost.connect(losses.append)
    with simulation() as sim:
        with lock("a", release="send") as lease:
            for node in sim.nodes:
                node.store.reset()
            silence(sim, 0)
        assert outcomes == []
        sim.advance(LONG)

        assert (outcomes, lease.reason, losses) == (["expired"], "forgotten", [])
        assert "lock lost: a (forgotten)" in caplog.text


def test_block_that_outlived_its_lease_waits_and_raises():
    """The lease may end before the release arrives; then only the replies tell whether the lock was lost."""
    with simulation() as sim, pytest.raises(LockLostError):  # noqa: PT012
        with lock("a", ttl=10, renew=False, release="send") as lease:
            assert not lease.hold.waits_at_end
            sim.advance(lease.remaining() - TIMEOUT)
            assert lease.hold.waits_at_end
            sim.pause(20)


@pytest.mark.parametrize(
    ("what", "value"),
    [("django_redlock.runtime.threads.THREADS.greenlets", True), ("django_redlock.runtime.process.process.ends", True)],
    ids=["gevent", "end of the process"],
)
def test_release_waits_where_nobody_else_could_read_the_replies(monkeypatch: pytest.MonkeyPatch, what: str, value: Any):
    """A thread cannot use the connections of a greenlet, and after the exit handler no thread is left."""
    with simulation() as sim:
        lease = lock("a").acquire()
        silence(sim, 0, 1)
        monkeypatch.setattr(what, value)

        assert lease.release(wait=False) == "unknown"
        assert not locks["default"].driver.unattended


def answer(request: HttpRequest) -> HttpResponse:
    return HttpResponse("done")


def stream(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(["done"])


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("view", [answer, stream])
@pytest.mark.parametrize(("option", "pending"), [(None, 1), ("send", 1), ("wait", 0)])
def test_response_does_not_wait_for_the_release(outcomes: list[str], view: Any, option: Any, pending: int):
    """A locked view sends its release, unless the settings say that it waits; the outcome is reported all the same."""
    with simulation(release=option) as sim:
        lock("warm up").acquire().release()
        request = RequestFactory().post("/")

        def slowly(request: HttpRequest) -> HttpResponseBase:
            silence(sim, 0, 1)
            return view(request)

        response = locked_view("report")(slowly)(request)
        response.close()

        assert len(locks["default"].driver.unattended) == pending
        sim.advance(LONG)
        assert outcomes == ["released", "unknown"]


# The next acquisition, waiters, transactions


# The end of a transaction, of the manager, of the loop and of the process


@pytest.mark.django_db(transaction=True)
def test_release_after_a_transaction_does_not_wait(outcomes: list[str]):
    """The release at the commit is sent as well; until the commit the lock is held."""
    with simulation() as sim:
        with transaction.atomic():
            with lock("a", on_commit=True, release="send"):
                silence(sim, 0, 1, 2)
            assert len(locks["default"].driver.unattended) == 0
        assert len(locks["default"].driver.unattended) == 1
        sim.advance(LONG)
        assert outcomes == ["unknown"]


async def test_close_waits_for_the_outcome(outcomes: list[str], flavour: Flavour):
    """Nothing is left open, and the signal is sent when the replies have come, or their time has passed."""
    with simulation() as sim:
        async with flavour.entered(lock("a", release="send")):
            silence(sim, 0, 1)

        await flavour.close(locks["default"])

        assert (outcomes, len(locks["default"].driver.unattended)) == (["unknown"], 0)


def test_thread_that_ends_leaves_its_connections_to_others():
    """A connection set belongs to a thread only while a release is open on it."""
    with simulation() as sim:
        idle = locks["default"].driver.gather.idle

        def work() -> None:
            with lock("a", release="send"):
                silence(sim, 0, 1)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert (len(idle.sets), len(idle._kept)) == (0, 1)

        sim.advance(LONG)

        assert (len(idle.sets), len(idle._kept)) == (1, 0)
