"""
``compat.Lock`` and ``compat.AsyncLock``: redis-py's locks in signature and behaviour, without their known defects.

Most tests run for both.
"""

import asyncio
import copy
import inspect
import logging
import math
import pickle
import re
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from django.core.cache import caches
from django.core.exceptions import SynchronousOnlyOperation
from redis import exceptions
from redis.asyncio.lock import Lock as RedisAsyncLock
from redis.lock import Lock as RedisLock
from valkey import exceptions as valkey_exceptions

from django_redlock import QuorumUnavailableError, RedlockError, inventory, locks
from django_redlock.compat import AsyncLock, Lock, LockError, LockNotOwnedError
from django_redlock.compat.holds import TimedLease
from django_redlock.engine.watchdog import Chore, Watchdog, watchdog
from django_redlock.signals import lock_forced
from django_redlock.testing import Simulation
from tests.waiting import eventually

PATIENCE = 20.0  # seconds after which an expected event counts as missing
TTL = 30.0  # seconds of a lease in virtual time
NAME = "report"
OPTIONS = {"restart_guard": False, "node_timeout": 0.2}
MEMORY = ["memory://a", "memory://b", "memory://c"]
FLAVOURS = {"blocking": Lock, "asyncio": AsyncLock}
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
async def three_in_memory(settings):
    """Three nodes in memory."""
    settings.REDLOCK = {"default": {"NODES": MEMORY, "OPTIONS": OPTIONS}}
    yield
    await locks["default"].aclose()


@pytest.fixture(params=FLAVOURS)
def make(request):
    """Makes locks of each flavour."""
    flavour = FLAVOURS[request.param]
    return lambda name=NAME, **arguments: flavour(None, name, **arguments)


async def done(result):
    """Return the result of a method, in either flavour."""
    return await result if inspect.isawaitable(result) else result


@asynccontextmanager
async def entered(lock):
    """Run the body in the lock's own ``with`` block."""
    if isinstance(lock, Lock):
        with lock:
            yield lock
    else:
        async with lock:
            yield lock


@pytest.fixture
async def sim():
    """Three nodes in memory, in virtual time."""
    options = {"ttl": TTL, "max_ttl": TTL, "node_timeout": 1.0, "restart_guard": False, "renew": False}
    with Simulation(check=False, **options) as simulation:
        yield simulation
        await locks["default"].aclose()


async def wait(sim, lock, seconds):
    """Let virtual time pass: a task sleeps, and the simulation replaces the threads of blocking code."""
    if isinstance(lock, AsyncLock):
        await asyncio.sleep(seconds)
    else:
        sim.advance(seconds)


def left_on_nodes(name=NAME):
    """Return the seconds that a lock has left, by the node with the most."""
    held = inventory.find_lock(name)
    return max(view.left for view in held.views if view.fingerprint) if held else -1  # a busy node may be late


def force_release(name=NAME):
    """Release a lock as an operator does."""
    return inventory.force_release(name, inventory.find_lock(name).fingerprint)


def fail(**how):
    """Make all nodes in memory fail, or work again."""
    for node in locks["default"].nodes:
        vars(node).update(how)


# The interface


@pytest.mark.parametrize(("ours", "theirs"), [(Lock, RedisLock), (AsyncLock, RedisAsyncLock)])
@pytest.mark.parametrize("method", ["__init__", "acquire", "release", "extend", "reacquire", "locked", "owned"])
def test_arguments_are_those_of_redis_py(ours, theirs, method):
    """Every method takes the arguments of redis-py 8.1, in their order, with their defaults; ``using`` comes after."""

    def arguments(cls):
        found = inspect.signature(getattr(cls, method)).parameters.values()
        return [(each.name, each.default, each.kind) for each in found if each.name != "using"]

    wanted = arguments(theirs)
    assert arguments(ours)[: len(wanted)] == wanted


@pytest.mark.parametrize("error", [LockError("is not held", NAME), LockNotOwnedError("was lost", NAME)])
def test_errors_are_caught_by_code_for_redis_py_and_for_redlock(error):
    """The errors are redis-py's, valkey-py's and ours, name the lock, and survive the way from another process."""
    again = pickle.loads(pickle.dumps(error))

    assert isinstance(error, (exceptions.LockError, ValueError))
    assert isinstance(error, valkey_exceptions.LockError)
    assert isinstance(error, valkey_exceptions.LockNotOwnedError) == (type(error) is LockNotOwnedError)
    assert isinstance(error, RedlockError)
    assert isinstance(error, exceptions.LockNotOwnedError) == (type(error) is LockNotOwnedError)
    assert (type(again), str(again), again.lock_name) == (type(error), str(error), NAME)
    assert NAME in str(again)


def test_lock_of_a_cache_is_replaced_by_ours(nodes, settings):
    """Our lock accepts the arguments of django-redis' ``cache.lock()``; the first argument stays the cache."""
    pytest.importorskip("django_redis")
    settings.CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": nodes.urls[0]}}
    settings.REDLOCK = {"default": {"NODES": ["cache:default"], "OPTIONS": OPTIONS}}
    cache = caches["default"]
    arguments = {"timeout": 5, "sleep": 0.05, "blocking": True, "blocking_timeout": 1, "thread_local": False}
    before = cache.lock(NAME, **arguments)

    with Lock(cache, NAME, **arguments) as after:
        assert after.owned()

    assert isinstance(before, RedisLock)
    assert {each: getattr(after, each) for each in arguments} == {each: getattr(before, each) for each in arguments}
    taken = set(inspect.signature(caches["default"].client.lock).parameters)
    assert taken - set(inspect.signature(Lock).parameters) == {"key", "version", "client"}


@pytest.mark.parametrize(("name", "text"), [(memoryview(b"report"), "report"), (b"report", "report"), (7, "7")])
async def test_a_name_in_bytes_or_digits_is_a_text(make, name, text):
    """redis-py takes names as bytes and whole numbers, too, and the name counts when the lock is acquired."""
    lock = make("other")
    lock.name = name

    assert await done(lock.acquire(blocking=False))
    assert not await done(make(text).acquire(blocking=False))
    assert not inventory.find_lock("other")


NO_COPY = r"'report' cannot be pickled or copied.*local\.token"
NO_SCRIPT = r"has no lua_extend: .* extend\(t, replace_ttl=True\).* redlock_run"
MISTAKES = [
    *((lambda kind, copied=each: copied(kind(None, NAME)), TypeError, NO_COPY) for each in (copy.copy, copy.deepcopy)),
    (lambda kind: pickle.dumps(kind(None, NAME)), TypeError, NO_COPY),
    # A call of django-redis' cache.lock() is not moved over with another meaning.
    (lambda kind: kind(None, key=NAME), TypeError, "unexpected keyword argument 'key'"),
    (lambda kind: kind(None, NAME, client=None), TypeError, "unexpected keyword argument 'client'"),
    (lambda kind: kind(caches["default"], NAME, None, 60), TypeError, "third argument .* the version; write timeout="),
    # redbeat replaces the script of extend(), which would have no effect.
    (lambda kind: setattr(kind(None, NAME), "lua_extend", print), AttributeError, NO_SCRIPT),
    (lambda kind: type("Patched", (kind,), {"do_acquire": print}), TypeError, "Patched has no do_acquire: "),
    (lambda kind: setattr(kind, "lua_release", None), AttributeError, "Lock has no lua_release: "),
    # A timeout of 0 does not mean for ever, and a tiny one does not become an error of the server.
    *(
        (lambda kind, timeout=timeout: kind(None, NAME, timeout=timeout), ValueError, "timeout must be")
        for timeout in (0, 0.0004, math.nan, math.inf, True, "5")
    ),
]


@pytest.mark.parametrize("flavour", FLAVOURS.values())
@pytest.mark.parametrize(("mistake", "error", "message"), MISTAKES)
def test_mistake_with_a_lock_of_redis_py_says_what_to_write(flavour, mistake, error, message):
    """A copy would be a second holder; what has no effect here, or another meaning, is refused."""
    with pytest.raises(error, match=message):
        mistake(flavour)


async def test_using_chooses_the_nodes(make, settings):
    """The nodes are those of the alias, whatever the first argument is."""
    settings.REDLOCK = {**settings.REDLOCK, "other": {"NODES": ["memory://x"]}}

    held = [await done(make(using=using).acquire(blocking=False)) for using in ("default", "other", "other")]

    assert held == [True, True, False]


# Acquiring and releasing


async def test_lease_and_token_are_there_while_the_lock_is_held(make):
    """``lease`` has a fencing token that grows from hold to hold; ``local.token`` is what redis-py has there."""
    lock, tokens = make(), []

    for _ in range(2):
        async with entered(lock):
            assert lock.local.token == lock.lease.secret.encode()
            tokens.append(lock.lease.fencing_token)
            assert await done(lock.acquire(blocking=False)) is False  # and the first hold stays
            assert await done(lock.acquire(blocking_timeout=0.05)) is False
            assert (lock.local.token, lock.lease.fencing_token) == (lock.lease.secret.encode(), tokens[-1])

    assert tokens[0] < tokens[1]
    assert lock.lease is None
    assert lock.local.token is None


async def test_taken_lock_is_waited_for_as_long_as_was_said(make, sim):
    """The body of a ``with`` block never runs without the lock; in redis-py a long ``sleep`` ends the wait at once."""
    sim.rival().lock(NAME).acquire()
    lock = make(blocking_timeout=20, sleep=60)

    started = sim.clock()
    with pytest.raises(exceptions.LockError, match=r"'report'.*not acquired") as caught:
        async with entered(lock):
            pytest.fail("entered without the lock")
    assert 20 <= sim.clock() - started < 21
    assert await done(lock.acquire(blocking_timeout=5)) is False

    assert 25 <= sim.clock() - started < 27
    assert caught.value.lock_name == NAME


async def test_too_few_nodes_are_an_error_of_their_own(make):
    """A lock is neither taken nor free if nobody can tell; one that is held stays as it was, also by the clock."""
    lock = make(timeout=5)
    await done(lock.acquire())
    fail(down=True)

    for call in (lambda: make().acquire(blocking=False), lock.locked):
        with pytest.raises(QuorumUnavailableError, match=r"2 of 3 nodes must answer in time.*a: (refused|reset)"):
            await done(call())
    assert await done(lock.owned()) is True
    with pytest.raises(QuorumUnavailableError, match="a majority of the nodes must answer"):
        await done(lock.extend(20))
    assert 0 < lock.lease.remaining() < 5

    fail(down=False)
    await done(lock.extend(5))
    assert 5 < lock.lease.remaining() < 10


async def test_nodes_that_do_not_reply_may_have_done_what_was_asked(make, caplog):
    """A lock counts as shortened if it may be, and one that was released ends by itself: that is no error to raise."""
    lock = make(timeout=10)
    await done(lock.acquire())
    fail(silent=True)

    with pytest.raises(QuorumUnavailableError):
        await done(lock.extend(1, replace_ttl=True))
    assert 0 < lock.lease.remaining() < 1
    with caplog.at_level(logging.WARNING, "django_redlock"):
        await done(lock.release())

    assert any("too few nodes" in record.message for record in caplog.records)
    assert lock.local.token is None


async def test_lock_of_the_parent_process_is_not_released_by_a_fork(make):
    lock = make(timeout=5)
    await done(lock.acquire())
    lock.lease.hold._pid = -1  # as if this process were a child of that one

    assert await done(lock.owned()) is False
    with pytest.raises(LockNotOwnedError, match="fork of the holder"):
        await done(lock.release())

    assert left_on_nodes() > 0


# Reset


async def test_reset_takes_the_lock_from_whoever_holds_it(make):
    """``reset()`` frees this name and no other; the holder learns at its next extension that it was taken away."""
    holder, other, lock = make(timeout=5), make("other", timeout=5), make(timeout=5)
    await done(holder.acquire())
    await done(other.acquire())

    forced = []

    def receive(name, outcome, **about):
        forced.append((name, outcome))

    lock_forced.connect(receive)
    assert await done(lock.reset()) is None

    assert forced == [(NAME, "released")]
    assert await done(lock.acquire(blocking=False)) is True
    assert await done(other.owned()) is True
    assert await done(holder.lease.extend() if isinstance(holder, Lock) else holder.lease.aextend()) is False
    assert holder.lease.reason == "revoked"
    with pytest.raises(LockNotOwnedError):
        await done(holder.release())
    assert await done(lock.owned()) is True


async def test_reset_of_the_own_lock_or_a_foreign_key(make):
    """A reset ends the own lock here, too, and frees a foreign key without expiry, which would stay for ever."""
    lock = make()
    await done(lock.acquire())
    lease = lock.lease

    await done(lock.reset())

    assert (lock.local.token, lock.lease, lease.valid()) == (None, None, False)
    with pytest.raises(LockError, match="not held here"):
        await done(lock.release())
    for node in locks["default"].nodes:
        node.store.put(inventory.slugs_of(NAME)[0], "somebody else", None)
    assert await done(lock.acquire(blocking=False)) is False
    await done(lock.reset())
    assert await done(lock.acquire(blocking=False)) is True


async def test_reset_that_nodes_do_not_carry_out_names_them(make, monkeypatch):
    """Nodes do not answer, or tell who holds the lock and execute no release; the error has what each replied."""
    holder = make()
    await done(holder.acquire())

    def break_off(request, *mark, node, execute):
        node.down = type(request).__name__ == "Release"
        return execute(request, *mark)

    fail(down=True)
    with pytest.raises(QuorumUnavailableError, match="2 of 3 nodes must answer"):
        await done(make().reset())
    fail(down=False)
    with monkeypatch.context() as patch:
        for node in locks["default"].nodes[1:]:
            patch.setattr(node, "execute", partial(break_off, node=node, execute=node.execute))
        with pytest.raises(QuorumUnavailableError, match="2 of 3 nodes must answer") as caught:
            await done(make().reset())
    fail(down=False)

    assert caught.value.nodes == {"a": "released", "b": "reset", "c": "reset"}
    assert await done(holder.owned()) is True


# Leaving a block


@pytest.mark.parametrize("ended", [True, False])
async def test_lost_lock_is_one_record_of_the_log(make, sim, caplog, ended):
    """
    It does not matter whether the lease has noticed the loss, or only the release at the end of the block does.

    Leaving the block raises the loss, unless an exception of the body does.
    """
    async with entered(make(timeout=5, raise_on_release_error=False)) as lock:
        await (wait(sim, lock, 6) if ended else done(force_release()))

    records = [(record.levelname, record.lock) for record in caplog.records if record.event == "lock_lost"]
    assert records == [("ERROR" if ended else "WARNING", NAME)]
    with pytest.raises(LockNotOwnedError):
        async with entered(make(timeout=5)):
            force_release()
    with pytest.raises(ZeroDivisionError):
        async with entered(make(timeout=5)):
            1 / (force_release() != "released")


# How long a lock is held


async def test_lock_without_timeout_has_an_expiry_and_is_renewed(make, sim):
    """No key lasts for ever; a living process keeps the lock, even where leases are not renewed by default."""
    lock = make()

    assert await done(lock.acquire())
    assert 0 < left_on_nodes() <= TTL
    await wait(sim, lock, 10 * TTL)

    assert await done(lock.owned())
    assert lock.lease.extensions >= 30
    await done(lock.release())


async def test_lock_ends_with_its_timeout(make, sim):
    """A lock with a timeout is not renewed; another holder gets it, and the first learns of it."""
    lock = make(timeout=20)
    await done(lock.acquire())
    assert 0 < left_on_nodes() <= 20

    await wait(sim, lock, 20)

    assert lock.lease.lost.is_set()
    assert await done(lock.owned()) is False
    sim.rival().lock(NAME, wait=1).acquire()
    with pytest.raises(LockNotOwnedError, match="ran out"):
        await done(lock.release())


async def test_timeout_longer_than_the_longest_lease_is_kept_in_pieces(make, sim):
    """The nodes store one lease at most, renewed until the timeout is over; a refused extension changes nothing."""
    lock = make(timeout=2 * TTL)
    await done(lock.acquire())
    assert await done(lock.extend(TTL)) is True
    assert left_on_nodes() <= TTL
    with pytest.raises(ValueError, match="too short for a node_timeout"):
        await done(lock.extend(0.3, replace_ttl=True))

    await wait(sim, lock, 2.9 * TTL)
    assert await done(lock.owned())
    await wait(sim, lock, 0.1 * TTL)

    assert lock.lease.lost.is_set()
    assert lock.lease.extensions >= 2
    assert lock.lease.reason == "expired"


def test_timeout_of_several_leases_is_kept_in_an_event_loop_of_a_simulation():
    """The simulation may block to extend the lease; a program that would block its event loop is still told so."""

    async def work():
        async with AsyncLock(None, NAME, timeout=4 * TTL) as lock:
            await asyncio.sleep(3 * TTL)
            assert await lock.owned()

    async def extend(lock):
        lock.extend(1)

    with Simulation(ttl=TTL):
        asyncio.run(work())
        lock = Lock(None, "other", timeout=TTL)
        lock.acquire()
        with pytest.raises(SynchronousOnlyOperation):
            asyncio.run(extend(lock))


def test_timeout_that_takes_several_leases_is_renewed_before_chores(monkeypatch):
    """A sign of life that waits for silent nodes does not cost it the lock."""
    order = []

    class Sign(Chore):
        def due(self):
            return 0.0

        def do(self):
            order.append("sign of life")

    lock = Lock(None, NAME, timeout=90)
    lock.acquire()
    timed = next(each for each in watchdog._all() if isinstance(each, TimedLease))
    monkeypatch.setattr(TimedLease, "do", lambda timed: order.append("timed lease"))

    Watchdog()._tend([Sign(), timed])

    assert order == ["timed lease", "sign of life"]
    lock.release()


async def test_nothing_is_held_longer_than_the_options_allow(make, settings):
    """The error names the option, or the number of extensions; an extension to nothing is refused, too."""
    settings.REDLOCK = {"default": {"NODES": MEMORY, "OPTIONS": OPTIONS | {"max_hold": 100, "max_extensions": 1}}}
    lock = make(timeout=90)
    await done(lock.acquire())
    for additional, replace in ((0, True), (-200, False), (math.nan, False)):
        with pytest.raises(ValueError, match=r"at least 0\.1 seconds|finite number"):
            await done(lock.extend(additional, replace_ttl=replace))

    with pytest.raises(ValueError, match=r"at most 100 seconds.*max_hold.*not 101"):
        await done(make("other", timeout=101).acquire())
    with pytest.raises(LockError, match=r"more than 100 seconds.*max_hold"):
        await done(lock.extend(20))
    await done(lock.extend(1))
    with pytest.raises(LockError, match="more than 1 times"):
        await done(lock.extend(1))


# The owner of a lock


def test_other_threads_hold_nothing_unless_they_share_the_lock():
    """The lock belongs to the thread that acquired it; with ``thread_local=False`` another thread can release it."""
    lock, shared = Lock(None, NAME, timeout=5), Lock(None, "shared", thread_local=False)
    lock.acquire()
    shared.acquire()

    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: lock.local.token).result(PATIENCE) is None
        assert other.submit(lock.owned).result(PATIENCE) is False
        assert isinstance(other.submit(lock.release).exception(PATIENCE), LockError)
        assert other.submit(shared.owned).result(PATIENCE) is True
        assert other.submit(shared.release).result(PATIENCE) is None
    assert (lock.owned(), shared.locked()) == (True, False)


async def test_other_tasks_hold_nothing():
    """Two tasks that share a lock cannot release each other's hold; a coroutine in a task of its own can."""
    lock = AsyncLock(None, NAME, timeout=5)
    assert await asyncio.create_task(lock.acquire())

    async def meddle():
        assert lock.local.token is None
        assert await lock.owned() is False
        with pytest.raises(LockError, match="held by another thread or task: write thread_local=False to share"):
            await lock.release()
        with pytest.raises(LockError, match="write thread_local=False to share"):
            await lock.extend(5)

    await asyncio.create_task(meddle())
    assert await asyncio.create_task(lock.owned())


async def test_cancelled_release_can_be_repeated():
    """The token still exists when a release was cancelled before the nodes got it; the release is redelivered, too."""
    lock = AsyncLock(None, NAME, timeout=5)
    await lock.acquire()
    fail(deaf=True)
    releasing = asyncio.create_task(lock.release())
    await asyncio.sleep(0)

    releasing.cancel()
    await asyncio.wait([releasing])
    fail(deaf=False)
    await locks["default"].aclose()  # the replies to that release never come

    assert releasing.cancelled()
    with suppress(LockNotOwnedError):  # the first one may have arrived by now
        await lock.release()
    await eventually(lambda: not inventory.find_lock(NAME))


def test_locks_can_be_used_outside_of_an_event_loop():
    """A coroutine made outside any task belongs to the code outside."""
    lock = AsyncLock(None, NAME, timeout=5)

    async def run(coroutine):
        try:
            return await coroutine
        finally:
            await locks["default"].aclose()

    assert lock.local.token is None
    assert asyncio.run(run(lock.acquire()))
    assert lock.local.token == lock.lease.secret.encode()
    assert asyncio.run(run(lock.release())) is None


# Tokens


@pytest.mark.parametrize("chosen", [None, "worker-1", b"worker-1"])
async def test_token_that_was_handed_over(make, chosen):
    """The receiver of a token owns the lock, and is the holder, with a lease of its own, as soon as it extends it."""
    sender, receiver = make(timeout=10), make(timeout=10)
    await done(sender.acquire(token=chosen))
    assert not await done(receiver.acquire(blocking=False, token=chosen))  # which does not let two in
    receiver.local.token = sender.local.token.decode()
    assert chosen is None or sender.local.token == b"worker-1"
    assert await done(receiver.owned())

    assert await done(receiver.extend(10)) is True
    assert 10 < left_on_nodes() <= 20
    assert await done(receiver.reacquire()) is True

    assert 0 < receiver.lease.remaining() < 10
    assert receiver.lease.fencing_token > sender.lease.fencing_token
    assert await done(sender.owned()) is False
    assert await done(receiver.owned()) is True
    await done(receiver.release())
    assert await done(receiver.locked()) is False

    sender, receiver = make(timeout=10), make(timeout=10)
    await done(sender.acquire(token=chosen))
    receiver.local.token = sender.local.token
    await done(receiver.release())
    with pytest.raises(LockNotOwnedError):
        await done(sender.release())


async def test_token_that_is_handed_over_is_no_overlap_in_a_simulation(make, sim):
    """The sender gave the lock away; two holders of which neither did are still found, also after that."""
    sender, receiver = make(timeout=20), make(timeout=20)
    await done(sender.acquire())
    receiver.local.token = sender.local.token

    await done(receiver.reacquire())
    await done(receiver.release())
    await done(receiver.acquire())

    assert sim.overlaps == []
    for node in sim.nodes[:2]:
        node.step_clock(3600)
    sim.rival().lock(NAME, wait=0).acquire()
    assert sim.overlaps == [f"'{NAME}' was granted to rival 1 while this process had it."]


@pytest.mark.parametrize("method", ["release", "extend"])
async def test_token_of_nobody_does_nothing(make, method):
    """A token whose lock ended, or that was never valid, owns nothing, and another holder's lock stays."""
    await done(make(timeout=5).acquire())
    lock = make(timeout=5)
    lock.local.token = b"f" * 32

    assert await done(lock.owned()) is False
    with pytest.raises(LockNotOwnedError):
        await done(getattr(lock, method)(*([1] if method == "extend" else [])))

    assert await done(lock.locked()) is True


def test_neither_token_is_shown():
    """The printed form of a lock is not enough to release it."""
    lock = Lock(None, NAME, timeout=5)
    lock.acquire(token="worker-1")
    shown = repr(lock) + repr(lock.lease) + str(inventory.find_lock(NAME))

    assert "worker-1" not in shown
    assert lock.lease.secret not in shown


# redis-py's own tests


def test_docs_list_the_tests_that_must_fail():
    """docs/howto/migrate.md lists the tests of redis-py that differ on purpose, with the suite's reasons."""
    differences = tomllib.loads((ROOT / "tests/redis_py_suite/differences.toml").read_text())
    docs = (ROOT / "docs/howto/migrate.md").read_text()

    told = re.findall(r"^\| (.+) \| ((?:`test_\w+`(?:, )?)+) \|$", docs, re.MULTILINE)

    listed = {(about["reason"], test.rpartition("::")[2]) for test, about in differences.items()}
    assert {(reason, name) for reason, names in told for name in re.findall(r"\w+", names)} == listed
