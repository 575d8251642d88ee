"""Everyday uses of ``lock()``: at import, in an event loop, twice, to skip a taken lock, in a transaction."""

import asyncio
import gc
import pickle
import sys
import threading
import tracemalloc
import warnings
from collections import Counter, UserString
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, transaction
from django.test import override_settings
from django.utils.functional import lazystr

from django_redlock import (
    InvalidRedlockError,
    LockableQuerySet,
    LockLostError,
    LockTakenError,
    QuorumUnavailableError,
    fenced,
    lock,
    locked_command,
    locked_view,
    locks,
)
from django_redlock.checks import check_decorators, check_deployment, check_settings
from django_redlock.testing import Simulation
from tests.managers import Asyncio, Blocking, Flavour, Manager, unwatched
from tests.shop.models import Order

NODES = ["memory://a", "memory://b", "memory://c"]


def redlock(**options: Any) -> Any:
    """Set ``REDLOCK`` to three nodes in memory with these options."""
    return override_settings(REDLOCK={"default": {"NODES": NODES, "OPTIONS": options}})


@pytest.fixture(autouse=True)
def blocking_in_coroutine_tests() -> None:
    """Let coroutine tests get the same refusals as users."""


# At import


def test_decorator_that_the_settings_do_not_allow_is_found_by_the_check():
    """The command manage.py check finds a decorated function whose lock can never be taken."""

    @lock("long", ttl=300)
    def long() -> None: ...

    @lock("elsewhere", using="nope")
    def elsewhere() -> None: ...

    found = [message for message in check_decorators() if message.id == "redlock.E011"]

    assert any("long" in message.msg and "max_ttl" in message.msg for message in found)
    assert any("elsewhere" in message.msg and "no alias 'nope'" in message.msg for message in found)
    del long, elsewhere


# In an event loop


async def test_blocking_lock_in_an_event_loop_is_refused(monkeypatch: pytest.MonkeyPatch):
    """A blocking lock would stop all tasks. Django refuses its database there too, and both obey the same variable."""
    monkeypatch.delenv("DJANGO_ALLOW_ASYNC_UNSAFE", raising=False)
    refused = [
        lambda: lock("loop").__enter__(),
        lambda: lock("loop").acquire(),
        lambda: lock("loop").try_acquire(),
        lambda: lock("loop")(lambda: None)(),
    ]
    async with lock("lease") as lease:
        with pytest.raises(SynchronousOnlyOperation, match=r"aextend\(\)"):
            lease.extend()
    for way in refused:
        with pytest.raises(SynchronousOnlyOperation, match="async with lock"):
            way()

    assert await asyncio.to_thread(lambda: lock("loop", wait=0).acquire().release()) == "released"
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
    with lock("loop", wait=0) as lease:
        assert lease.valid()


# A lock that waits for itself


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        *(({}, {"wait": 5}), ({"shared": True}, {}), ({}, {"shared": True}), ({"reentrant": True}, {})),
        *(({}, {"limit": 2}), ({"limit": 2}, {}), ({"shared": True}, {"limit": 2}), ({"limit": 2}, {"limit": 3})),
    ],
)
def test_block_that_would_wait_for_itself_raises_at_once(outer: dict[str, Any], inner: dict[str, Any]):
    """Only the waiting thread could end the hold that it waits for; the error names both places and the remedy."""
    with lock("self", **outer):
        with pytest.raises(
            RuntimeError, match=r"'self'.*test_everyday\.py:\d+; at .*test_everyday\.py:\d+ it would wait"
        ) as refused:
            lock("self", **inner).acquire()
        same = all({"shared", "limit"}.isdisjoint(options) for options in (outer, inner))
        assert ("reentrant=True" in str(refused.value)) == same
        with pytest.raises(LockTakenError):
            lock("self", **{**inner, "wait": 0}).acquire()
    assert lock("self", wait=0).acquire().release() == "released"


def test_block_that_has_all_permits_raises_at_once():
    """A thread that would wait for one of its own permits raises; one that waits for others' permits too waits."""
    with lock("permits", limit=2):
        other = lock("permits", limit=2).acquire()
        with pytest.raises(LockTakenError):
            lock("permits", limit=2, wait=0.01).acquire()
        other.release()
        with lock("permits", limit=2), pytest.raises(RuntimeError, match="would wait for itself"):
            lock("permits", limit=2, wait=5).acquire()


def test_reader_that_would_wait_behind_a_writer_that_waits_for_it_raises_at_once():
    """A shared lock that is entered again while a writer waits would wait for its own outer block."""
    writers: list[Any] = []
    writer = threading.Thread(target=lambda: writers.append(lock("read").acquire().release()))
    with lock("read", shared=True):
        writer.start()
        while lease := lock("read", shared=True).try_acquire():
            lease.release()
        with pytest.raises(RuntimeError, match="would wait for itself"):
            lock("read", shared=True, wait=5).acquire()
    writer.join()
    assert writers == ["released"]


async def test_task_that_would_wait_for_itself_raises_at_once():
    """The same error for a task; another task waits."""
    async with lock("self"):
        with pytest.raises(RuntimeError, match="would wait for itself"):
            await lock("self").aacquire()
        with pytest.raises(RuntimeError, match="would wait for itself"):
            await lock(["other", "self"]).aacquire()
        other = asyncio.create_task(lock("self").aacquire())
        await asyncio.sleep(0)
    assert await (await other).arelease() == "released"


@pytest.mark.parametrize(("outer", "inner"), [({"shared": True},) * 2, ({"limit": 2},) * 2, ({"reentrant": True},) * 2])
def test_block_that_waits_for_nothing_of_its_own_is_let_in(outer: dict[str, Any], inner: dict[str, Any]):
    """A thread may hold two permits, or two shared holds."""
    with lock("many", **outer), lock("many", **inner) as lease:
        assert lease.valid()


async def blocking() -> None:
    lock("blocking").acquire()


def warnings_of_waiting(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """Return the log records that say that code waits for a lock that it holds itself."""
    return [each for each in caplog.records if getattr(each, "event", "") == "waits_for_itself"]


def test_lease_that_another_thread_may_release_causes_a_warning_after_one_ttl(caplog: pytest.LogCaptureFixture):
    """A lease outside a block may be handed on, so the thread waits, and the log names both places."""
    with Simulation(nodes=3, ttl=10.0, check=False) as sim:
        lease, line = lock("handed\non").acquire(), sys._getframe().f_lineno
        with pytest.raises(LockTakenError):
            lock("handed\non", wait=9).acquire()
        with pytest.raises(SynchronousOnlyOperation):
            asyncio.run(blocking())
        assert warnings_of_waiting(caplog) == []
        with pytest.raises(LockTakenError):
            lock("handed\non", wait=25).acquire()

        [record] = warnings_of_waiting(caplog)
        assert record.getMessage().count("test_everyday.py:") == 2
        assert f"test_everyday.py:{line}, or was called" in record.getMessage()
        assert "\n" not in record.getMessage()
        assert lease.release() == "released"
        sim.advance(1)


def test_wait_in_a_called_context_causes_a_warning_after_one_ttl(caplog: pytest.LogCaptureFixture):
    """An event loop that a thread runs inside its own block waits for that block; the log names both places."""

    async def inner() -> None:
        await lock("across", wait=25).aacquire()

    with Simulation(nodes=3, ttl=10.0, check=False):
        with lock("across"), pytest.raises(LockTakenError):
            async_to_sync(inner)()

        [record] = warnings_of_waiting(caplog)
        assert record.getMessage().count("test_everyday.py:") == 2


def test_wait_for_nodes_names_the_lock(caplog: pytest.LogCaptureFixture):
    """Each of many callers that wait while nodes are down logs for which lock it waits."""
    with redlock():
        for node in locks["default"].nodes[:2]:
            vars(node)["down"] = True
        for name in ("report:7", "report:8\n"):
            with pytest.raises(QuorumUnavailableError):
                lock(name, wait=0.3).acquire()

    told = [each for each in caplog.records if getattr(each, "event", "") == "no_quorum"]
    assert [vars(each)["lock"] for each in told] == ["report:7", "report:8\n"]
    assert [each.getMessage().partition(" waits")[0] for each in told] == ["lock report:7", "lock report:8\\n"]


# To skip a taken lock


def test_lock_that_is_taken_is_skipped_without_an_error():
    """Try_acquire() makes one attempt and returns a lease, or None; its block releases it, and is entered once."""
    lease = lock("skip").try_acquire()
    assert lease is not None
    assert lock("skip").try_acquire() is None
    second = pytest.raises(RuntimeError, match="'skip' is in a block already")

    with lease as same:
        assert same is lease
        with second, lease:  # its end would leave the rest of the outer block without the lock
            pytest.fail("entered")
        assert lease.valid()

    assert lease.reason == "released"
    with pytest.raises(LockLostError), lease:
        pytest.fail("the body ran without the lock")
    with lock("skip") as lease, second, lease:
        pytest.fail("entered")


async def test_lock_that_is_taken_is_skipped_in_an_event_loop():
    """The same for a task; a lease of an event loop is left with ``async with`` only."""
    lease = await lock("skip").atry_acquire()
    assert lease is not None
    assert await lock("skip").atry_acquire() is None

    with pytest.raises(TypeError, match="async with"), lease:
        pass
    async with lease:
        assert lease.valid()

    assert lease.reason == "released"


def test_block_of_a_lease_raises_its_loss_unless_the_body_raised():
    """The block of a lease ends like that of a lock."""
    lease = lock("skip").acquire()
    with pytest.raises(LockLostError), lease:
        lease.hold.deadline = 0.0
    again = lock("skip", wait=0, barge=True)
    locks["default"].release("skip", lease.secret)
    with pytest.raises(ZeroDivisionError), again.acquire() as lost:  # noqa: PT012
        lost.hold.deadline = 0.0
        raise ZeroDivisionError


async def test_decorated_function_is_skipped_when_the_lock_is_taken():
    """If_taken="skip" has a decorated function return None; it has no other use."""
    ran: list[str] = []
    skipping = lock("skip", wait=0, if_taken="skip")

    @skipping
    async def awork() -> str:
        ran.append("awork")
        return "done"

    @lock("skip", if_taken="skip")
    def work() -> str:
        ran.append("work")
        return "done"

    async with lock("skip"):
        assert await awork() is None
        assert await asyncio.to_thread(work) is None
    assert ran == []
    assert await awork() == "done"
    assert await asyncio.to_thread(work) == "done"


# How long to wait


def test_project_decides_how_long_a_lock_waits():
    """OPTIONS["wait"] applies wherever a lock does not say; None waits for ever, also against the option."""
    with redlock(wait=0):
        with lock("wait"):
            with pytest.raises(LockTakenError):
                lock("wait").acquire()
            with pytest.raises(RuntimeError, match="wait for itself"):
                lock("wait", wait=None).acquire()
        assert locks["default"].lock("wait").description().wanted.wait == 0
    assert locks["default"].lock("wait").description().wanted.wait is None
    with redlock(wait=-1), pytest.raises(InvalidRedlockError, match="wait must be"):
        locks["default"]
    assert not any("redlock.E" in each.id for each in check_settings())


def test_check_advises_a_wait_for_production():
    """By default a request waits for ever, so check --deploy asks for a decision."""
    for options, advised in (({}, True), ({"wait": 10}, False), ({"wait": None}, False)):
        with redlock(**options):
            assert ("redlock.W105" in {each.id for each in check_deployment()}) is advised


# In a transaction


@pytest.mark.django_db(transaction=True)
def test_lock_inside_a_transaction_warns_that_it_is_released_before_the_commit():
    """The next holder would read uncommitted data; the warning names the line, once."""
    with warnings.catch_warnings(record=True) as caught, transaction.atomic():
        warnings.simplefilter("default")
        for _ in range(2):
            with lock("inside"):
                pass
        with lock("inside").acquire():
            pass

    assert [(each.category, each.filename.endswith("test_everyday.py")) for each in caught] == [
        (RuntimeWarning, True)
    ] * 2
    assert "on_commit=True" in str(caught[0].message)


@pytest.mark.django_db(transaction=True)
def test_project_decides_what_a_lock_inside_a_transaction_is():
    """OPTIONS["in_transaction"] makes a lock inside a transaction an error, or allows it."""
    with redlock(in_transaction="error"), transaction.atomic():
        with pytest.raises(RuntimeError, match=r"'inside'.*'default'.*on_commit=True"):
            lock("inside").__enter__()
        with lock("inside", on_commit=True):
            pass
        assert locks["default"].lock("inside", wait=0).try_acquire() is None
    with redlock(in_transaction="allow"), transaction.atomic(), lock("inside", wait=0) as lease:
        assert lease.valid()
    with redlock(in_transaction="never"), pytest.raises(InvalidRedlockError, match="in_transaction must be"):
        locks["default"]


@pytest.mark.django_db(transaction=True)
def test_lease_that_may_not_be_used_inside_a_transaction_is_released():
    """The block does not run, so the lock is free for the next caller, who would otherwise skip the work."""

    @lock("inside", if_taken="skip")
    def skipped() -> None: ...

    with redlock(in_transaction="error"):
        with transaction.atomic(), pytest.raises(RuntimeError, match="inside a transaction"):
            skipped()
        lease = lock("inside").try_acquire()
        assert lease is not None
        lease.release()
        with lock("inside") as lease, transaction.atomic(), pytest.raises(RuntimeError, match="block"):
            lease.__enter__()
        assert lease.reason == "released"


@pytest.mark.django_db
def test_transaction_of_a_test_case_is_none_of_the_projects():
    """The lock of a test in Django's TestCase is released at the end of its block, without a warning."""
    with lock("inside", on_commit=True) as lease:
        pass
    assert lease.reason == "released"


@pytest.mark.django_db(transaction=True, databases=["default", "warehouse"])
@pytest.mark.parametrize("end", ["commit", "rollback", "savepoint", "two databases", "failing callback"])
def test_lock_for_the_commit_is_released_after_it(end: str):
    """On_commit=True keeps the lock beyond its block, until all open transactions have ended, whichever way."""
    seen: list[Any] = []

    def look() -> None:
        seen.append(lease.reason)

    try:
        with transaction.atomic(), transaction.atomic(using="warehouse" if end == "two databases" else "default"):
            transaction.on_commit(look)  # before the release
            if end == "failing callback":
                transaction.on_commit(lambda: 1 / 0)  # Django then calls no later one
            with transaction.atomic():
                with lock("commit", on_commit=True) as lease:
                    assert lease.valid()
                transaction.set_rollback(end == "savepoint")
            seen.append(lease.reason)
            if end == "rollback":
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass

    assert set(seen) == {None}
    assert lease.reason == "released"
    assert lock("commit", wait=30).acquire().release() == "released"


@pytest.mark.django_db(transaction=True)
def test_lock_for_the_commit_that_was_lost_in_its_block_rolls_back():
    """The loss is raised inside the transaction, as without on_commit."""
    with pytest.raises(LockLostError), transaction.atomic():
        with lock("commit", on_commit=True) as lease:
            lease.hold.deadline = 0.0
    assert not connections["default"].in_atomic_block


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("within", [True, False], ids=["in the transaction", "after it"])
def test_reentrant_lock_is_entered_again_after_an_inner_block_for_the_commit(within: bool):
    """The end of the transaction gives back the entry of that block alone."""
    again = lock("commit", reentrant=True, if_taken="skip")(lambda: "done")
    with redlock(in_transaction="allow"), lock("commit", reentrant=True, wait=0) as lease:
        with transaction.atomic():
            with lock("commit", reentrant=True, on_commit=True):
                pass
            if within:
                assert again() == "done"
                with pytest.raises(RuntimeError, match="in a block already"), lease:
                    pytest.fail("entered")
        assert again() == "done"
        assert lease.valid()
    assert lease.reason == "released"


@pytest.mark.django_db(transaction=True)
def test_entry_that_is_refused_is_given_back():
    """A reentrant lock can be entered again after an entry that its transaction or its loss refused, and is free."""
    again = lock("a", reentrant=True, if_taken="skip")(lambda: "done")
    with redlock(in_transaction="error"):
        with lock("a", reentrant=True, wait=0) as lease:
            with transaction.atomic(), pytest.raises(RuntimeError, match="inside a transaction"):
                again()
            assert again() == "done"
        assert lease.reason == "released"

        lost = lock("a", reentrant=True).acquire()
        lost.hold.deadline = 0.0
        with pytest.raises(LockLostError), lost:
            pytest.fail("entered")
        assert again() is None  # the nodes still have the lost one


@pytest.mark.django_db(transaction=True)
def test_lock_for_the_commit_is_taken_twice_in_one_transaction_only_if_it_is_reentrant():
    """Only the end of the transaction could free it, so its thread would wait for itself."""
    with transaction.atomic():
        with lock("commit", on_commit=True):
            pass
        with pytest.raises(RuntimeError, match="would wait for itself"), lock("commit", on_commit=True, wait=5):
            pytest.fail("taken twice")
    with transaction.atomic():
        for _ in range(2):
            with lock("commit", on_commit=True, reentrant=True):
                pass
        assert lock("commit").try_acquire() is None
    assert lock("commit", wait=0).acquire().release() == "released"


@pytest.mark.django_db(transaction=True)
def test_commit_that_django_does_not_see_is_refused():
    """With autocommit off, Django learns of no commit, so on_commit=True is refused, as transaction.on_commit() is."""
    transaction.set_autocommit(False)
    try:
        with pytest.raises(RuntimeError, match="autocommit is off for database 'default'"):
            lock("commit", on_commit=True).__enter__()
        with transaction.atomic(), pytest.raises(RuntimeError, match="autocommit is off for database 'default'"):
            lock("commit", on_commit=True).__enter__()
        with lock("commit") as lease:
            assert lease.valid()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    with lock("commit", on_commit=True) as lease:
        assert lease.valid()


@pytest.mark.django_db
def test_autocommit_that_the_settings_switch_off_is_seen_before_the_first_query(monkeypatch: pytest.MonkeyPatch):
    """A thread that has not used the database yet has no connection, but the settings of one."""
    monkeypatch.setitem(connections["warehouse"].settings_dict, "AUTOCOMMIT", False)
    monkeypatch.setattr(connections["warehouse"], "connection", None)

    with pytest.raises(RuntimeError, match="autocommit is off for database 'warehouse'"):
        lock("commit", on_commit=True).__enter__()


# Mistakes of users of other locks


def work() -> None: ...


class View:
    pass


def page(request: Any) -> Any: ...


rows: Any = LockableQuerySet(Order)
Task: Any = type("Task", (), {"__module__": "celery.app.task", "__call__": lambda self: None})


async def coroutine() -> None: ...


class Coroutine:
    async def __call__(self, *args: object) -> None: ...


def generator() -> Any:
    yield


async def async_generator() -> Any:
    yield


def lease() -> Any:
    """Return a lease, which the test leaves behind."""
    return lock("lease", wait=0).acquire()


MISTAKES: list[tuple[Any, type[Exception], str]] = [
    (lambda: lock(work), TypeError, r"@lock needs a name.*@lock\('work'\)"),
    (lambda: lock("a")(View), TypeError, "class View cannot be decorated.*locked_view"),
    (lambda: lock("a", timeout=5), TypeError, r"lock\(\) has no argument 'timeout'. It has .*ttl, "),
    (lambda: lock(5), TypeError, r"A lock's name must be a str, not int; write lock\(str"),
    (lambda: lock(b"a"), TypeError, "must be a str, not bytes"),
    (lambda: lock(["a", 1]), TypeError, "must be a str, not int"),
    (lambda: lock(lazystr("invoice")), TypeError, r"must be a str, not __proxy__; write lock\(str"),
    (lambda: lock(["a", lazystr("invoice")]), TypeError, r"must be a str, not __proxy__; write lock\(str"),
    (lambda: lock(UserString("invoice")), TypeError, "must be a str, not UserString"),
    (lambda: lock(""), ValueError, "must not be empty"),
    (lambda: lock("x" * 1_000_000), ValueError, r"may have 8192 bytes.*has 1000000; use an identifier or a digest"),
    (lambda: lock("\ud800"), ValueError, "UTF-8 cannot encode"),
    (lambda: lock([]), ValueError, "names nothing to lock"),
    (lambda: lock(map(str, range(10_001))), ValueError, "may have 10000 names, not 10001"),
    (lambda: lock("a", label=5), TypeError, "label must be a str, not int"),
    (lambda: lock("a").acquire(blocking=False), TypeError, r"acquire\(\) got an unexpected .* 'blocking'"),
    (lambda: fenced(lease()).run(work()), TypeError, r"run\(\) needs a function and its arguments, not None"),
    (lambda: lock("a", ttl=90).acquire(), ValueError, "^ttl must be from 0.1 to 60 seconds"),
    (lambda: lock("a", wait=-1), ValueError, r"^wait must be None \(for ever\) or a number of .* not -1"),
    (lambda: lock("a", limit=0), ValueError, "limit must be a whole number from 1 to 1000, not 0"),
    (lambda: lock(["a", "b"], limit=2), ValueError, "limit=2 and several names cannot be combined"),
    (lambda: lock("a", cancel_on_lost=True).acquire(), RuntimeError, "works with 'async with' only"),
    (
        lambda: asyncio.run(lock("a", cancel_on_lost=True).aacquire()),
        RuntimeError,
        "has cancel_on_lost, which works with 'async with' only",
    ),
    (lambda: lock("a", on_commit=True).acquire(), RuntimeError, "on_commit=True, which works with 'with' only"),
    (lambda: asyncio.run(lock("a", on_commit=True).aacquire()), RuntimeError, "which works with 'with' only"),
    (lambda: lock("a", if_taken="ignore"), ValueError, "'raise' or 'skip'"),
    (lambda: lock("a", if_taken="skip").__enter__(), TypeError, "try_acquire"),
    (lambda: asyncio.run(lock("a", if_taken="skip").__aenter__()), TypeError, "atry_acquire"),
    (lambda: locks.default, AttributeError, r"locks has no 'default'; write locks\['default'\]"),
    (lambda: pickle.dumps(lock("a")), TypeError, "Lock cannot be pickled.*its name"),
    (lambda: pickle.dumps(lease()), TypeError, "cannot be pickled or copied"),
    (lambda: lock("a").release(), AttributeError, r"no attribute 'release'.*lease = .*acquire\(\)"),
    (lambda: fenced(lock("a")), TypeError, r"fenced\(\) needs a lease.*as lease, fenced\(lease\)"),
    (lambda: fenced(lease(), using=[]), ValueError, "using names no database, so that nothing would be fenced"),
    (lambda: fenced(lease(), using=None), TypeError, "using must be an alias in DATABASES, or several, not None"),
    (lambda: fenced(lease(), retries=-1), ValueError, "retries must be a whole number from 0, not -1"),
    (lambda: lock("a", shared="no"), TypeError, "shared must be True or False, not 'no'"),
    (lambda: lock("a")(classmethod(work)), TypeError, r"Write @classmethod above @lock"),
    (lambda: lock("a")(partial(generator)), TypeError, "cannot be decorated with a lock.* inside it"),
    (lambda: lock("a")(async_generator), TypeError, "cannot be decorated with a lock.* inside it"),
    (lambda: lock("a")(contextmanager(generator)), TypeError, "cannot be decorated with a lock.* inside it"),
    (lambda: lock("a")(asynccontextmanager(async_generator)), TypeError, "cannot be decorated.* inside it"),
    (lambda: lock("a")(transaction.atomic(generator)), TypeError, "cannot be decorated with a lock.* inside it"),
    (
        lambda: fenced(lease()).run(generator),
        TypeError,
        r"run\(\) needs a plain function, and generator is a generator",
    ),
    (lambda: lock("a")(Task()), TypeError, r"Celery task .*Write @lock\(\.\.\.\) below"),
    (lambda: lock("a")("shop.jobs.work"), TypeError, "decorates a function, not 'shop.jobs.work'"),
    (lambda: lease().extend(timeout=5), TypeError, r"extend\(\) has no argument 'timeout'. It has ttl"),
    (lambda: lease().ensure("5"), ValueError, "margin must be a finite number of seconds, not '5'"),
    (lambda: lease().on_lost(None), TypeError, r"on_lost\(\) needs a function that takes the lease, not None"),
    (lambda: lease().on_lost(Coroutine()), TypeError, "on_lost.*plain function.*await lease.lost.wait"),
    (lambda: lease().on_lost(partial(generator)), TypeError, "on_lost.*plain function.*await lease.lost.wait"),
    (lambda: lease().on_lost(coroutine), TypeError, "on_lost.*plain function.*await lease.lost.wait"),
    (lambda: fenced(lease()).run(coroutine), TypeError, r"run\(\) needs a plain function, and coroutine is"),
    (lambda: locked_view("a", methods=["PSOT"]), ValueError, "methods has 'PSOT'; did you mean 'POST'?"),
    (lambda: locked_view("a")("shop.views.pay"), TypeError, "@locked_view decorates views, not 'shop.views.pay'"),
    (
        lambda: locked_view("a", on_busy=lambda request: 1),
        TypeError,
        "on_busy is called with the request and the error",
    ),
    (
        lambda: locked_view("{request.path}")(page)(View()),
        TypeError,
        r"got a View instead of a request.*@method_d",
    ),
    (lambda: locked_command("a", skip_exit_code="0"), ValueError, "skip_exit_code must be a whole number .*, not '0'"),
]


@pytest.mark.parametrize("ttl", [600, 0, -1, float("nan"), True, "3"])
async def test_several_leases_are_extended_for_no_ttl_that_a_lock_may_not_have(ttl: Any):
    """A lease that is longer than max_ttl would outlast the time for which a restarted node gives no vote."""
    lease = await lock("bound").aacquire()
    before = lease.hold.deadline

    with pytest.raises(ValueError, match="ttl must be"):
        await locks["default"].aextend([lease], ttl=ttl)
    with pytest.raises(ValueError, match="ttl must be"):
        await asyncio.to_thread(locks["default"].extend, [lease], ttl=ttl)

    assert lease.hold.deadline == before
    assert await lease.arelease() == "released"


@pytest.mark.parametrize(("mistake", "kind", "message"), MISTAKES, ids=[message[:30] for _, _, message in MISTAKES])
def test_mistake_with_a_lock_says_what_to_write(mistake: Any, kind: type[Exception], message: str):
    """The error shows users of redis-py's locks how to use this one, and does not repeat a megabyte."""
    with pytest.raises(kind, match=message) as caught:
        mistake()
    assert len(str(caught.value)) < 500


def test_lock_costs_the_same_however_many_are_held(memory: Manager):
    """To find out whether a thread would wait for itself, its leases are looked at when it waits, not at each lock."""
    manager, calls = memory(ttl=60.0), []
    kept = []

    def take_some() -> int:
        """Take some more locks; return how many functions are called for that."""
        calls.clear()
        sys.setprofile(lambda frame, event, about: calls.append(event))
        try:
            kept.extend([manager.lock(f"a{len(kept)}.{number}", renew=False).acquire() for number in range(300)])
        finally:
            sys.setprofile(None)
        return calls.count("call")

    assert take_some() < 1.5 * take_some()
    assert all(lease.valid() for lease in kept)


def test_acquisition_calls_no_callback_of_another_lease(memory: Manager):
    """It looks at the leases of its thread, and leaves their losses to those who tend or use them."""
    manager, told = unwatched(memory(ttl=60.0)), []
    lost = manager.lock("lost", renew=False).acquire()
    lost.on_lost(told.append)
    lost.hold.deadline = 0.0

    kept = [manager.lock(f"kept {number}", renew=False).acquire() for number in range(20)]

    assert not told
    assert not lost.valid()
    assert told == [lost]
    assert all(lease.valid() for lease in kept)


@pytest.mark.parametrize("flavour", [Blocking(), Asyncio()])
async def test_loss_that_only_the_release_notices_is_told(memory: Manager, flavour: Flavour):
    """Whoever waits for ``lost`` goes on, and callbacks are called; the block raises, so nothing is logged as well."""
    manager, told = memory(), []
    lease = await flavour.acquire(manager.lock("a", renew=False))
    lease.on_lost(told.append)
    lost = lease.lost
    for node in manager.nodes:
        node.store.reset()

    assert await flavour.release(lease) == "expired"

    assert (lost.is_set(), told, lease.reason) == (True, [lease], "forgotten")


async def test_loss_that_a_thread_notices_is_told_in_the_event_loop():
    """There, a callback may set an asyncio event; in another thread, nothing would wake the tasks that wait for it."""
    lease, told = await lock("lost", renew=False).aacquire(), asyncio.Event()
    threads: list[Any] = []
    lease.on_lost(lambda lost: (threads.append(threading.current_thread()), told.set()))
    lease.hold.deadline = 0.0

    assert not await asyncio.to_thread(lease.valid)
    await told.wait()

    assert threads == [threading.current_thread()]


def test_error_of_a_shared_lock_names_nobody(memory: Manager):
    """Those who share a lock are not told apart, so the error has no host, process or time."""
    manager = memory()
    sharing = manager.lock("a", shared=True).acquire()

    with pytest.raises(LockTakenError, match="Lock 'a' is held by others, who share it") as taken:
        manager.lock("a", wait=0).acquire()

    assert taken.value.holder["kind"] == "shared"
    assert [taken.value.holder[about] for about in ("host", "pid", "since")] == [None] * 3
    sharing.release()


def test_released_locks_leave_nothing_to_the_garbage_collector():
    """In a large process, a collection costs more than a lock."""
    with redlock():
        with lock("warm up"):
            pass
        gc.collect()
        gc.disable()
        before = Counter(type(each).__name__ for each in gc.get_objects())
        try:
            for number in range(200):
                with lock(f"n{number}"):
                    pass
            after = Counter(type(each).__name__ for each in gc.get_objects())
            assert (after - before)["LeaseHold"] + (after - before)["Round"] < 20
        finally:
            gc.enable()


def test_locks_of_many_names_are_not_kept():
    """Each is a new lock, which is never described again."""
    with redlock():
        tracemalloc.start()
        try:
            for number in range(30):
                lock([f"{number}:{name}" for name in range(1000)]).description()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert kept < 1_000_000


class Slow(dict[str, Any]):
    """The entry of an alias that takes as long to read as a test wants."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reading, self.go_on = threading.Event(), threading.Event()

    def get(self, key: str, default: Any = None) -> Any:
        self.reading.set()
        assert self.go_on.wait(60)
        return super().get(key, default)


def test_change_of_settings_during_the_first_use_of_an_alias():
    """A lock that was described meanwhile does not keep the old settings for ever."""
    slow, found = Slow({"NODES": NODES}), []
    with override_settings(REDLOCK={"default": {"NODES": NODES}, "slow": slow}):
        first_use = threading.Thread(target=lambda: found.append(locks["slow"]))
        change = threading.Thread(target=locks.reset)
        first_use.start()
        assert slow.reading.wait(60)
        change.start()
        change.join(0.1)  # it waits for the first use
        slow.go_on.set()
        first_use.join(60)
        change.join(60)
        assert found[0].replaced or locks["slow"] is found[0]
