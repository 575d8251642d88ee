"""
The contract of a node, for those who write a kind of node. It needs pytest.

Subclass :class:`NodeContract` in a module of tests, and say in ``open_nodes`` how nodes of your kind are opened. pytest
then runs every test of the class; the kinds of node in this package pass the same ones.
"""

import asyncio
import pickle
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, TypeVar

import pytest

from ..core.names import common_value, queue_of, slug
from ..core.node_state import NodeState
from ..core.protocol import (
    ABSENT,
    SHARED,
    Acquire,
    Extend,
    Failure,
    Kind,
    Raise,
    Release,
    Reply,
    Request,
    Survey,
    Term,
)
from ..core.rules import Rules
from ..engine.lock import Lock
from ..engine.manager import LockManager
from ..exceptions import LockLostError, LockTakenError, RedlockError
from ..inventory.survey import tell_nodes
from ..nodes.base import INCOMPLETE, AsyncLink, Link, LinkError, Node

PATIENT = 60.0  # seconds that nothing takes, however busy the machine is
LONGEST = 12.0  # seconds that a lock of 10 seconds may still be held for: a store may count whole ones

T = TypeVar("T")


class BlockingCode:
    """Code that blocks; see :class:`AsyncioCode` for its twin."""

    def acquire(self, lock: Lock) -> Any:
        """Take a lock."""
        return lock.acquire()

    def release(self, lease: Any) -> str:
        """Release a lease."""
        return str(lease.release())

    def extend(self, lease: Any) -> bool:
        """Extend a lease."""
        return bool(lease.extend())

    @contextmanager
    def entered(self, lock: Lock) -> Iterator[Any]:
        """Hold a lock for a block."""
        with lock as lease:
            yield lease

    def together(self, locks: Sequence[Lock], body: Callable[[Any], object]) -> None:
        """Enter each lock at the same moment, and call *body* with the lease."""
        barrier = threading.Barrier(len(locks))

        def enter(lock: Lock) -> None:
            barrier.wait(PATIENT)
            with lock as lease:
                body(lease)

        with ThreadPoolExecutor(len(locks)) as threads:
            list(threads.map(enter, locks))

    def close(self, managers: Sequence[LockManager]) -> None:
        """Close the connections."""
        for manager in managers:
            manager.close()


class AsyncioCode:
    """Code in an event loop."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; between two of them, the event loop stands still."""
        return self._runner.run(coroutine)

    def acquire(self, lock: Lock) -> Any:
        """Take a lock."""
        return self.run(lock.aacquire())

    def release(self, lease: Any) -> str:
        """Release a lease."""
        return str(self.run(lease.arelease()))

    def extend(self, lease: Any) -> bool:
        """Extend a lease."""
        return bool(self.run(lease.aextend()))

    @contextmanager
    def entered(self, lock: Lock) -> Iterator[Any]:
        """Hold a lock for a block, which is no coroutine."""
        lease = self.run(lock.__aenter__())
        try:
            yield lease
        except BaseException as error:
            self.run(lock.__aexit__(type(error), error, error.__traceback__))
            raise
        self.run(lock.__aexit__(None, None, None))

    def together(self, locks: Sequence[Lock], body: Callable[[Any], object]) -> None:
        """Enter each lock at the same moment, in a task of its own, and call *body* with the lease."""

        async def enter(lock: Lock) -> None:
            async with lock as lease:
                await asyncio.sleep(0)
                body(lease)

        async def enter_all() -> None:
            await asyncio.gather(*map(enter, locks))

        self.run(enter_all())

    def close(self, managers: Sequence[LockManager]) -> None:
        """Close the connections, and the event loop."""
        for manager in managers:
            self.run(manager.aclose())
            manager.close()
        self._runner.close()


Flavour = BlockingCode | AsyncioCode
OpenNodes = Callable[[int], Sequence[Node]]
Make = Callable[..., LockManager]


class NodeContract:
    """
    What every kind of node must do.

    A subclass overrides the fixture ``open_nodes``. Its tests use five nodes at most, with locks of ten seconds and a
    node timeout of two.
    """

    @pytest.fixture
    def open_nodes(self) -> OpenNodes:
        """
        Return a function that opens a number of nodes.

        The nodes are independent of each other: five stores that were empty when the test began. The function is called
        several times in a test, and opens the first of the same stores again, as another process would.
        """
        raise NotImplementedError("override the fixture open_nodes")

    @pytest.fixture(params=[BlockingCode, AsyncioCode], ids=["blocking", "asyncio"])
    def caller(self, request: pytest.FixtureRequest, managers: list[LockManager]) -> Iterator[Flavour]:
        """Each flavour of code that uses locks."""
        flavour: Flavour = request.param()
        yield flavour
        flavour.close(managers)

    @pytest.fixture
    def managers(self) -> Iterator[list[LockManager]]:
        """The managers of a test, which are closed at its end."""
        made: list[LockManager] = []
        yield made
        BlockingCode().close(made)

    @pytest.fixture
    def make(self, open_nodes: OpenNodes, managers: list[LockManager]) -> Make:
        """Return a function that makes a manager over five nodes, or another number, which are connected."""

        def make(count: int = 5, **options: Any) -> LockManager:
            rules = Rules(count, **{"ttl": 10.0, "restart_guard": False, "node_timeout": 2.0, **options})
            managers.append(manager := LockManager(list(open_nodes(count)), rules))
            listed = [Kind.LISTED] * count
            wait_until(lambda: [reply.kind for reply in manager.survey(count=1).values()] == listed)
            return manager

        return make

    @pytest.fixture
    def node(self, open_nodes: OpenNodes) -> Node:
        """One node."""
        return open_nodes(1)[0]

    # The node

    def test_node_says_what_it_is(self, node: Node) -> None:
        """Pages and errors show its name and its address, so neither is a URL, which may have a password."""
        assert node.name
        assert node.address
        assert "//" not in f"{node.name} {node.address} {node!r}"
        assert {type(each) for each in (node.instant, node.calls, node.fails_over)} == {bool}

    def test_nodes_are_independent(self, open_nodes: OpenNodes) -> None:
        """Each has an address and a run of its own: one server has one vote."""
        nodes = open_nodes(3)
        with closing(nodes[0].connect(PATIENT)) as one, closing(nodes[1].connect(PATIENT)) as other:
            assert len({node.address for node in nodes} | {node.name for node in nodes}) >= 3
            assert one.greeting.run_id
            assert one.greeting.run_id != other.greeting.run_id

    def test_node_describes_itself_again(self, node: Node) -> None:
        """A link asks its node again from time to time, and gets the same answer while nothing has changed."""
        with closing(node.connect(PATIENT)) as link:
            link.greet()
            again = wait_until(link.receive_greeting)

            assert (again.run_id, again.mark) == (link.greeting.run_id, link.greeting.mark)

    @pytest.mark.parametrize("seed", range(8))
    def test_node_answers_as_the_reference(self, node: Node, seed: int) -> None:
        """Whatever requests come in whatever order, the replies are those of the reference in memory."""
        reference = NodeState(time.time)
        with closing(node.connect(PATIENT)) as link:
            for request in requests(random.Random(seed), str(seed)):
                expected = reference.execute(request)
                assert comparable(ask(link, request)) == comparable(expected), request

    def test_node_answers_the_same_to_an_event_loop(self, node: Node) -> None:
        """The replies on a link for asyncio are those of the reference, too, in the order of the requests."""
        reference, sequence = NodeState(time.time), requests(random.Random(99), "loop")

        async def answers() -> list[Reply]:
            with closing(await node.aconnect(PATIENT)) as link:
                return [await aask(link, request) for request in sequence]

        for request, reply in zip(sequence, asyncio.run(answers()), strict=True):
            assert comparable(reply) == comparable(reference.execute(request)), request

    def test_store_outlives_a_link(self, open_nodes: OpenNodes) -> None:
        """A lock is held for every link, until its lease ends."""
        first, second = acquire("a"), acquire("b")
        with closing(open_nodes(1)[0].connect(PATIENT)) as link:
            assert ask(link, first).kind is Kind.ACCEPTED
        with closing(open_nodes(1)[0].connect(PATIENT)) as link:
            assert ask(link, second).kind is Kind.BUSY
            assert ask(link, Release(first.slugs, first.secret)).kind is Kind.RELEASED
            assert ask(link, second).kind is Kind.ACCEPTED

    def test_one_of_several_processes_at_once_is_granted_a_lock(self, open_nodes: OpenNodes) -> None:
        """A node decides about one request after the other, whichever connections they come from."""
        links = [open_nodes(1)[0].connect(PATIENT) for _ in range(4)]
        barrier = threading.Barrier(len(links))

        def turn(number: int, process: int) -> Acquire | None:
            request = acquire(f"{number * len(links) + process:032x}")
            barrier.wait(PATIENT)
            return request if ask(links[process], request).kind is Kind.ACCEPTED else None

        with ExitStack() as stack, ThreadPoolExecutor(len(links)) as threads:
            for link in links:
                stack.enter_context(closing(link))
            for number in range(30):
                granted = [each for each in threads.map(partial(turn, number), range(len(links))) if each]
                assert len(granted) == 1
                assert ask(links[0], Release(granted[0].slugs, granted[0].secret)).kind is Kind.RELEASED

    def test_waiter_is_notified_of_its_turn(self, node: Node) -> None:
        """A node that ``calls`` names the waiters of a process that are first in a queue; any other one says so."""
        called: list[str] = []
        if not node.calls:
            with pytest.raises(LinkError) as refused:
                node.listen("p", PATIENT, called.append)
            assert refused.value.failure is Failure.DOES_NOT_NOTIFY
            return
        with closing(node.connect(PATIENT)) as link, closing(node.listen("p", PATIENT, called.append)) as notifications:
            held, waits = acquire("a"), acquire("b")._replace(waiter="p|1", stamp=1)
            assert ask(link, held).kind is Kind.ACCEPTED
            assert (reply := ask(link, waits)).kind is Kind.BUSY
            assert reply.position == 0
            assert not called + notifications.read()

            ask(link, Release(held.slugs, held.secret))

            assert wait_until(lambda: called + notifications.read()) == ["p|1"]

    # A lock over the nodes

    def test_free_lock_is_granted_for_its_ttl_less_the_drift(self, make: Make, caller: Flavour) -> None:
        """It is valid for the ttl less the drift; a second release reports the first, and harms no later holder."""
        manager = make(ttl=60.0)

        lease = caller.acquire(manager.lock("order:1"))

        assert lease.valid()
        assert 30.0 < lease.remaining() <= 60.0 - manager.rules.drift(60.0)
        assert (lease.name, lease.names) == ("order:1", ("order:1",))
        assert len(set(holders(manager, "{order:1}"))) == 1
        assert caller.release(lease) == "released"
        later = caller.acquire(manager.lock("order:1", wait=0))
        assert (caller.release(lease), lease.reason) == ("released", "released")
        assert later.valid()
        assert held_by(manager, "{order:1}", later.secret)
        assert caller.release(later) == "released"

    def test_held_lock_is_refused_with_its_holder(self, make: Make, caller: Flavour) -> None:
        """A held lock is *taken*; the error has lock, attempts, nodes, holder and time left; nothing is left behind."""
        manager = make()
        lease = caller.acquire(manager.lock("order:1", label="invoice run"))

        with pytest.raises(LockTakenError) as caught, caller.entered(manager.lock("order:1", wait=0)):
            pytest.fail("the body ran without the lock")

        error = caught.value
        assert (error.name, error.attempts) == ("order:1", 1)
        assert error.holder["label"] == "invoice run"
        assert "taken" in error.nodes.values()
        assert error.retry_after is not None
        assert 0 < error.retry_after <= LONGEST
        assert "'order:1' is held by manual invoice run on" in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        assert held_by(manager, "{order:1}", lease.secret)
        caller.release(lease)
        assert held_by(manager, "{order:1}")

    def test_fencing_tokens_increase_from_hold_to_hold(self, make: Make, caller: Flavour) -> None:
        """Every later holder has a greater token, also from another manager and for several names."""
        first, second = make(), make()
        tokens = []

        for turn in range(20):
            lease = caller.acquire((first, second)[turn % 2].lock(["a", "b"] if turn % 3 else "a"))
            tokens.append(lease.fencing_token)
            caller.release(lease)

        assert tokens == sorted(set(tokens))

    @pytest.mark.parametrize(
        ("revoke", "taken", "reason", "says"),
        [
            (False, False, "forgotten", "no longer know this holder"),
            (False, True, "superseded", "another caller"),
            (True, False, "revoked", "an operator took it away"),
            (True, True, "superseded", "another caller"),
        ],
    )
    def test_lock_that_was_freed_is_reported_when_the_block_ends(
        self, make: Make, caller: Flavour, revoke: bool, taken: bool, reason: str, says: str
    ) -> None:
        """Leaving the block raises the loss, as the work may not have been exclusive; it says if another came."""
        manager = make()

        with pytest.raises(LockLostError, match=f"'a' was lost after.*{says}") as caught:  # noqa: PT012
            with caller.entered(manager.lock("a", renew=False)) as lease:
                tell_nodes(manager, Release((slug("a"),), lease.secret, tombstone=60.0 * revoke, revoke=revoke))
                if taken:
                    caller.acquire(manager.on_behalf("a", detached=True))

        assert caught.value.reason == reason

    @pytest.mark.parametrize(
        ("shared", "holder"), [(False, "manual run of tonight on "), (True, "others, who share it")]
    )
    def test_superseded_holder_learns_of_it_at_its_next_extension(
        self, make: Make, caller: Flavour, shared: bool, holder: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A majority that knows a newer holder ends the lease at once, and one error tells who has the lock now."""
        manager = make()
        lease = caller.acquire(manager.lock("a", renew=False))
        manager.release("a", lease.secret)
        newer = caller.acquire(manager.lock("a", label="run of tonight", shared=shared))

        assert not caller.extend(lease)

        assert lease.reason == "superseded"
        assert newer.valid()
        [record] = [each for each in caplog.records if getattr(each, "event", "") == "lock_lost"]
        assert record.getMessage().startswith(f"lock lost: a (superseded); now it is held by {holder}")
        assert newer.secret not in caplog.text
        caller.release(newer)

    def test_hold_ends_on_the_nodes_by_their_own_clock(self, make: Make, caller: Flavour) -> None:
        """A dead holder blocks nobody once its lease has ended."""
        manager = make()
        caller.acquire(manager.on_behalf("a", ttl=0.5, renew=False, detached=True))

        later = caller.acquire(manager.lock("a", wait=60))

        assert held_by(manager, "{a}", later.secret)
        caller.release(later)

    def test_lock_is_kept_for_its_minimum_hold(self, make: Make, caller: Flavour) -> None:
        """It may be much longer than a lease, or shorter; the fencing token stays that of the run."""
        manager = make()
        night = caller.acquire(manager.lock("night", hold_for=600.0))
        minute = caller.acquire(manager.lock("minute", hold_for=1.0))

        assert [caller.release(lease) for lease in (night, minute)] == ["held", "held"]

        with pytest.raises(LockTakenError) as taken:
            caller.acquire(manager.lock("night", wait=0))
        assert 500 < (taken.value.retry_after or 0) <= 602
        assert taken.value.holder["state"] == "held"
        rows = [row for reply in manager.survey(slugs=("{night}", "{minute}")).values() for row in reply.rows]
        assert {row.fence for row in rows} == {night.fencing_token, minute.fencing_token}
        assert max(row.left or 0.0 for row in rows if row.slug == "{minute}") <= 3  # not the rest of its lease
        later = caller.acquire(manager.lock("minute", wait=PATIENT))
        assert later.fencing_token > minute.fencing_token
        caller.release(later)

    def test_several_names_are_locked_all_or_none(self, make: Make, caller: Flavour) -> None:
        """All names have one lease and one token; a caller that is refused one of them gets none."""
        manager = make()
        lease = caller.acquire(manager.lock(["b", "a"]))

        with pytest.raises(LockTakenError, match="'b, c'"):
            caller.acquire(manager.lock(["c", "b"], wait=0))

        assert lease.names == ("a", "b")
        assert held_by(manager, "{c}")
        assert caller.release(lease) == "released"
        assert held_by(manager, "{a}")
        assert held_by(manager, "{b}")

    def test_lock_is_taken_over_from_the_holder_that_is_named(self, make: Make, caller: Flavour) -> None:
        """A lock without a holder object passes only to the process that knows its token."""
        manager = make()
        queued = caller.acquire(manager.on_behalf("slot", ttl=600.0, secret="1" * 32, detached=True))

        with pytest.raises(LockTakenError):
            caller.acquire(manager.on_behalf("slot", wait=0, adopt="2" * 32))
        running = caller.acquire(manager.on_behalf("slot", wait=0, adopt="1" * 32))

        assert running.fencing_token > queued.fencing_token
        assert held_by(manager, "{slot}", running.secret)
        assert manager.release("slot", "1" * 32) == "taken"
        assert caller.release(running) == "released"

    def test_holder_that_was_replaced_does_not_come_back(self, make: Make, caller: Flavour) -> None:
        """A request to take the lock is refused after a later holder took it over, and even released it."""
        manager = make()
        later = manager.on_behalf("slot", wait=0, secret="2" * 32, adopt="1" * 32, detached=True)

        caller.release(caller.acquire(later))

        with pytest.raises(RedlockError):
            caller.acquire(manager.on_behalf("slot", wait=0, secret="1" * 32, detached=True))
        assert held_by(manager, "{slot}")

    def test_holder_that_was_replaced_gets_the_lock_back_from_the_present_one(
        self, make: Make, caller: Flavour
    ) -> None:
        """Nobody else can bring it back."""
        manager = make()
        first, second = "1" * 32, "2" * 32
        caller.acquire(manager.on_behalf("slot", wait=0, secret=first, detached=True))
        caller.acquire(manager.on_behalf("slot", wait=0, secret=second, adopt=first, detached=True))

        caller.acquire(manager.on_behalf("slot", wait=0, secret=first, adopt=second, detached=True))

        assert held_by(manager, "{slot}", first)
        assert manager.release("slot", second) == "taken"
        assert manager.release("slot", first) == "released"

    @pytest.mark.parametrize("alone", [True, False], ids=["one process", "several processes"])
    def test_contended_lock_lets_one_in_at_a_time(self, make: Make, caller: Flavour, alone: bool) -> None:
        """Contenders with one lock object, or with nodes of their own, enter one by one, in the order of the tokens."""
        if alone:
            locks = [make(retry_delay=0.002).lock("a")] * 12
        else:
            locks = [make(3, retry_delay=0.002).lock("a") for _ in range(4)]
        inside: list[int] = []
        tokens: list[int] = []

        def body(lease: Any) -> None:
            inside.append(1)
            time.sleep(0.001)
            assert len(inside) == 1
            assert lease.valid()
            tokens.append(lease.fencing_token)
            inside.pop()

        caller.together(locks, body)

        assert len(tokens) == len(locks)
        assert tokens == sorted(set(tokens))

    def test_hostile_names_are_names_like_any_other(self, make: Make, caller: Flavour) -> None:
        """Names with braces, newlines, globs and any script are separate locks, and can be listed."""
        manager = make()

        leases = [caller.acquire(manager.lock(name, wait=0)) for name in HOSTILE]

        # Any one node may have been too slow to get the first requests.
        listed = {row.slug for reply in manager.survey(count=50).values() for row in reply.rows}
        assert len([slug for slug in listed if not slug.endswith("~p")]) == len(HOSTILE)  # those are signs of life
        for lease in leases:
            assert caller.release(lease) == "released"

    def test_locks_are_listed_page_by_page(self, make: Make, caller: Flavour) -> None:
        """Each lock that is held is on one page."""
        manager = make(1)
        leases = [caller.acquire(manager.lock(f"n{number}", wait=0)) for number in range(7)]
        caller.release(leases.pop())
        pages: list[list[str]] = []
        cursor = ""
        with closing(manager.nodes[0].connect(PATIENT)) as link:
            while cursor or not pages:
                reply = ask(link, Survey(after=cursor, size=4))
                cursor = reply.cursor
                pages.append([row.slug for row in reply.rows])
                assert len(pages) < 10, "the cursor leads nowhere"

        assert sorted(slug for page in pages for slug in page) == [f"{{n{number}}}" for number in range(6)]
        assert all(len(page) <= 4 for page in pages)
        for lease in leases:
            caller.release(lease)

    def test_secrets_are_not_shown(self, make: Make, caller: Flavour, caplog: pytest.LogCaptureFixture) -> None:
        """No repr, log or error contains the secret."""
        manager = make()
        lease = caller.acquire(manager.lock("a"))

        with pytest.raises(LockTakenError) as caught:
            caller.acquire(manager.lock("a", wait=0))
        manager.release("a", lease.secret)
        caller.release(lease)

        shown = repr(lease) + repr(manager) + repr(manager.lock("a")) + str(caught.value) + repr(caught.value)
        assert lease.secret not in shown + caplog.text


HOSTILE = [
    "a{b}c",
    "}",
    "{",
    "a\nb\r\n$3\r\n",
    "*?[]\\",
    "schloß-äöü-锁",
    "a:h",
    "a~" + "0" * 32,
    " ",
    "\0",
    "x" * 200,
    "x" * 300 + "1",  # longer names are cut to a readable beginning and a digest
    "x" * 300 + "2",
    "é" * 150,
]


def wait_until(condition: Callable[[], T | None]) -> T:
    """Return what *condition* returns as soon as that is true; fail if it takes too long."""
    until = time.monotonic() + PATIENT
    while not (found := condition()):
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)
    return found


def holders(manager: LockManager, slug: str) -> list[str]:
    """Return the secrets that hold a name, one per node that has it."""
    replies: Mapping[int, Reply] = manager.survey(slugs=(slug,))
    values = [reply.rows[0].value for reply in replies.values() if reply.rows]
    return [value[:32] for value in values if value]


def held_by(manager: LockManager, slug: str, *secrets: str) -> bool:
    """Wait until exactly *secrets* hold a name: the last nodes may execute a release a moment after it ended."""
    return wait_until(lambda: set(holders(manager, slug)) == set(secrets))


# Requests and replies


def ask(link: Link, request: Request) -> Reply:
    """Send a request and return the reply."""
    link.send(request, {})

    def received() -> Reply | None:
        reply = link.receive(request) if link.readable() else INCOMPLETE
        if reply is None:
            link.send(request, {}, in_full=True)
        return None if reply is INCOMPLETE else reply

    return wait_until(received)


async def aask(link: AsyncLink, request: Request) -> Reply:
    """Send a request on a link for asyncio and return the reply."""
    replied: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def on_reply(reply: Reply | None) -> bool:
        if reply is None:
            link.send(request, {}, on_reply, in_full=True)
        else:
            replied.set_result(reply)
        return True

    link.send(request, {}, on_reply)
    return await asyncio.wait_for(replied, PATIENT)


def comparable(reply: Reply | None) -> Any:
    """Return what must be equal: everything except times."""
    assert reply is not None
    rows = [row._replace(left=None if row.left is None else row.left == ABSENT) for row in reply.rows]
    return reply.kind, reply.fence, bool(reply.left), reply.detail, reply.position, reply.terms, rows


def acquire(secret: str) -> Acquire:
    """Return a request for a lock of a minute; the secret is repeated up to its length."""
    secret = (secret * 32)[:32]
    return Acquire(("{held}",), secret, secret + '{"host":"h"}', 60.0, now(), 600.0, 1e9)


def now() -> int:
    """Return a fencing token as clocks give them."""
    return int(time.time() * 1e6)


def requests(chosen: random.Random, mark: str) -> list[Request]:
    """
    Return some requests that contend for a few names.

    Args:
        chosen: Decides.
        mark: Names and secrets have it, so that the requests of one test do not meet those of another.
    """
    x, y, z = (f"{{{name}{mark}}}" for name in "xyz")
    groups = [(x,), (y,), (x, y), (y, z), (x, y, z), (f"{x}#1",), (f"{x}#2",), (f"{y}#1",)]
    secrets = [f"{letter}{mark}".ljust(32, letter) for letter in "abc"]
    base = now()

    def token() -> int:
        return base + chosen.randrange(6)

    def hold(slugs: tuple[str, ...]) -> dict[str, Any]:
        """Return how to hold names: one holder, one of several who share them, or a permit."""
        if queue := queue_of(slugs[0]):
            return {"common": common_value(chosen.choice([2, 2, 3])), "shared": False, "queue": queue}
        return {"shared": chosen.random() < 0.5, "queue": ""}

    def one() -> Request:
        slugs, secret, keep = chosen.choice(groups), chosen.choice(secrets), chosen.choice([600.0, None])
        how = hold(slugs)
        unqueued = {name: value for name, value in how.items() if name != "queue"}
        value = secret + '{"host":"h"}'
        waiter = chosen.choice(["", f"p{mark}|1", f"p{mark}|2", f"q{mark}|1"])
        match chosen.randrange(9):
            case 0 | 1 | 2 | 3:
                return Acquire(
                    *(slugs, secret, value, 60.0, token(), keep, 1e9),
                    adopt=chosen.choice(["", *secrets]),
                    waiter=waiter,
                    stamp=token(),
                    barge=chosen.random() < 0.5,
                    strict=chosen.random() < 0.3,
                    **how,
                )
            case 4:
                return Raise(slugs, secret, token(), keep, bool(how["shared"]))
            case 5:
                ttl, shorten, last = chosen.choice([60.0, 90.0]), chosen.random() < 0.5, chosen.random() < 0.5
                return Extend((Term(slugs, secret, value, ttl, token(), shorten=shorten, last=last, **unqueued),), keep)
            case 6 | 7:
                whose = chosen.choice([secret, secret, SHARED])
                revoke, latest = chosen.random() < 0.5, chosen.choice([base + 3, base + 10**9])
                return Release(
                    *(slugs, whose, chosen.choice([0.0, 60.0]), waiter, bool(how["shared"]), how["queue"]),
                    revoke=revoke,
                    fencing_token=latest,
                )
        return Survey(slugs, waiters=chosen.choice([0, 1, 100, None]))

    return [one() for _ in range(25)]
