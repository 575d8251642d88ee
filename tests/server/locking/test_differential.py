"""The node in memory and the scripts on a real server give the same replies."""

import time
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from django_redlock import LockManager
from django_redlock.core.names import common_value, queue_of
from django_redlock.core.node_state import NodeState
from django_redlock.core.protocol import (
    PERMITS,
    SHARED,
    Acquire,
    Extend,
    Kind,
    Raise,
    Release,
    Repair,
    Reply,
    Request,
    Survey,
    Term,
    believable,
)
from django_redlock.core.round import Round
from django_redlock.testing import Servers
from tests.managers import real_manager, wait_until

SECRETS = ["a" * 32, "b" * 32, "c" * 32]
SLUGS = [("{x}",), ("{y}",), ("{x}", "{y}"), ("{y}", "{z}"), ("{x}", "{y}", "{z}")]
BASE = 1_795_000_000_000_000  # microseconds: tokens as clocks give them, so that Lua's default text would lose digits


SLUGS_OF_PERMITS = [("{x}#1",), ("{x}#2",), ("{y}#1",)]


def of_a_permit(request: Any) -> Any:
    """Only a permit joins the name of its lock, whose queue counts; a permit is not shared."""
    queue = queue_of(request.slugs[0])
    changes: dict[str, Any] = {"queue": queue} | ({"shared": False} if queue else {"common": ""})
    return request._replace(**{field: value for field, value in changes.items() if field in request._fields})


WAITERS = ["p|1", "p|2", "q|1"]

secrets, slugs = st.sampled_from(SECRETS), st.sampled_from([*SLUGS, *SLUGS_OF_PERMITS])
numbers = st.integers(0, 5).map(lambda step: BASE + step) | st.just(2**53 - 1)
keeps = st.sampled_from([600.0, None])
shared = st.booleans()
commons = st.sampled_from([common_value(2), common_value(2), common_value(3)])
terms = st.builds(
    Term, slugs, secrets, secrets, st.sampled_from([60.0, 90.0]), numbers, shared, st.booleans(), common=commons
).map(lambda term: of_a_permit(term._replace(value=f'{term.secret}{{"host":"h"}}')))
requests = st.one_of(
    st.builds(
        Acquire,
        slugs,
        secrets,
        secrets,
        st.just(60.0),
        numbers,
        keeps,
        st.just(1e9),
        st.sampled_from(["", *SECRETS]),
        st.sampled_from(["", *WAITERS]),
        st.integers(BASE, BASE + 3),
        st.booleans(),
        shared,
        strict=st.sampled_from([False, False, True]),
        common=commons,
        away=st.sampled_from([0.0, 0.0, 60.0]),
    ).map(lambda request: of_a_permit(request._replace(value=f'{request.secret}{{"host":"h"}}'))),
    st.builds(Raise, slugs, secrets, numbers, keeps, shared),
    st.builds(Extend, st.lists(terms, min_size=1, max_size=3).map(tuple), keeps),
    st.builds(
        Release,
        slugs,
        secrets | st.just(SHARED),
        st.sampled_from([0.0, 60.0]),
        st.sampled_from(["", *WAITERS]),
        shared,
        revoke=st.booleans(),
        fencing_token=numbers | st.just(0),
    ).map(of_a_permit),
    st.builds(Release, st.just(()), secrets, st.just(60.0), revoke=st.booleans()),
    slugs.map(Survey),
    slugs.map(lambda some: Survey((f"{some[0]}#1",), waiters=100)),
    st.builds(lambda some, waiters: Survey(some, waiters=waiters), slugs, st.sampled_from([0, 1, 100])),
    st.builds(lambda some, number, keep: Repair(some[0], number, keep), slugs, numbers | st.just(0), keeps),
)


def comparable(reply: Reply) -> Any:
    """Return what must be equal: everything except the clock, with times left rounded to a second."""
    rows = [row._replace(left=row.left is None or round(row.left)) for row in reply.rows]
    left = round(reply.left) if reply.left is not None else None
    # Of several busy names, both describe the first.
    return reply.kind, reply.fence, left, reply.detail, reply.position, reply.terms, rows, reply.total


def run(manager: LockManager, request: Request) -> Reply:
    round = Round.to_tell({0: request}, manager.rules.timeout(manager.rules.ttl))
    manager.driver.ask(round)
    return round.replies[0]


@pytest.fixture(params=["server", "cluster"])
def real_node(request: pytest.FixtureRequest, nodes: Servers):
    """A manager over one server or one cluster, the server that decides, and what its keys begin with."""
    if request.param == "server":
        url, server, prefix = nodes.urls[0], nodes[0], "t:"
    else:
        one = request.getfixturevalue("five_clusters")[0]
        one.clear()
        url, server, prefix = one.url, one.servers[0], "{t}:"
    return real_manager([url]), server, prefix


@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.endurance)])
def test_memory_node_answers_as_the_real_one(real_node: Any, examples: int):
    """Whatever requests come in whatever order, replies, queues and notifications are the same."""

    @settings(max_examples=examples, deadline=None)
    @given(st.lists(requests, min_size=1, max_size=25))
    def agrees(sequence: list[Request]) -> None:
        agree(real_node, sequence)

    agrees()


def forget_locks(client: redis.Redis) -> None:
    """Delete all keys but the mark of the memory, which the open connection knows."""
    if keys := [key for key in client.scan_iter() if not key.endswith("served")]:
        client.delete(*keys)


def agree(real_node: Any, sequence: list[Request]) -> tuple[NodeState, list[str]]:
    """Compare both after a sequence of requests; return the node in memory and the waiters that were notified."""
    manager, server, prefix = real_node
    store, told = NodeState(time.time), []
    store.listeners = dict.fromkeys("pq", told.append)

    with server.client() as client, client.pubsub(ignore_subscribe_messages=True) as notifications:
        forget_locks(client)
        notifications.subscribe(f"{prefix}w:p", f"{prefix}w:q")
        while len(client.pubsub_channels(f"{prefix}w:*")) < 2:
            pass
        for request in sequence:
            expected = store.execute(request)
            assert comparable(run(manager, request)) == comparable(believable(expected)), request
        for slug in ("{x}", "{y}", "{z}"):
            assert client.zrange(f"{prefix}{slug}:q", 0, -1) == store.waiters(slug)
            value = store.records.holder(slug, store.now()) or ""
            assert client.get(f"{prefix}{slug}:h") == (value or None)
            if value.startswith((SHARED, PERMITS)):
                assert sorted(client.zrange(f"{prefix}{slug}:r", 0, -1)) == sorted(store.sharers(slug))
        client.publish(f"{prefix}w:p", "the last")
        heard = list(iter(lambda: next_notification(notifications), "the last"))
        assert heard == told
    return store, told


def take(names: str, secret: str = "a", waiter: str = "", stamp: int = BASE, **options: Any) -> Acquire:
    """Return a request for names of one letter each."""
    secret *= 32
    request = Acquire(tuple(f"{{{name}}}" for name in names), secret, secret, 60.0, BASE, None, 1e9)
    return request._replace(waiter=waiter, stamp=stamp, **options)


def test_list_of_shared_holders_means_nothing_without_the_key(real_node: Any):
    """A node that lost the key accepts it again, for the time requested now and not for the earlier one."""
    term = Term(("{y}",), "c" * 32, "c" * 32, 90.0, BASE, shared=True)
    by_force = Release(("{y}",), SHARED)

    agree(real_node, [Extend((term,), None), by_force, Extend((term._replace(ttl=60.0),), None), take("y")])


@pytest.mark.parametrize("shared", [False, True])
def test_waiter_is_queued_up_to_the_first_name_that_is_taken(real_node: Any, shared: bool):
    """A claim to a later name would keep it from a caller that holds the first name and wants the later one, too."""
    held = [take("y"), take("xyz", "b", "p|1", shared=shared)]

    store, _ = agree(real_node, held)

    assert [store.waiters(f"{{{name}}}") for name in "xyz"] == [["p|1"], ["p|1"], []]
    assert agree(real_node, [*held, take("z", "c")])[1] == []


def test_waiter_leaves_the_queues_behind_a_name_that_is_taken_again(real_node: Any):
    """The next waiter there is notified, if this one was first."""
    behind = [
        take("z"),
        take("yz", "b", "p|1", BASE),
        take("z", "c", "q|1", BASE + 1),
        take("y", "c", barge=True),
        take("yz", "b", "p|1", BASE),
    ]

    store, told = agree(real_node, behind)

    assert [store.waiters(f"{{{name}}}") for name in "yz"] == [["p|1"], ["q|1"]]
    assert told == ["q|1"]


def test_waiter_leaves_the_queue_of_a_full_node(real_node: Any):
    """Otherwise the next waiters would stay behind one that has given up."""
    manager, server, prefix = real_node
    store, leave = NodeState(time.time), Release(("{x}",), "b" * 32, 60.0, "p|1")
    for request in (take("x"), take("x", "b", "p|1")):
        assert comparable(run(manager, request)) == comparable(store.execute(request))
    with server.client() as client:
        assert client.zrange(f"{prefix}{{x}}:q", 0, -1) == ["p|1"]
        client.config_set("maxmemory", 1)

        left = run(manager, leave)
        client.config_set("maxmemory", 0)

        assert comparable(left) == comparable(store.execute(leave))
        assert client.zrange(f"{prefix}{{x}}:q", 0, -1) == store.waiters("{x}") == []


def next_notification(notifications: Any) -> str:
    while (message := notifications.get_message(timeout=5)) is None:
        pass
    return message["data"]


def test_index_forgets_locks_that_expired(real_node: Any):
    """Names whose holder died leave the index with later acquisitions; a key without expiry stays listed."""
    manager, server, prefix = real_node
    with server.client() as client:
        client.zadd(f"{prefix}index", {"{dead}": 1, "{forever}": 2})
        client.set(f"{prefix}{{forever}}:h", "x" * 40)

        manager.lock("a").acquire()

        assert client.zscore(f"{prefix}index", "{dead}") is None
        assert client.zscore(f"{prefix}index", "{forever}") == float("inf")


def test_key_without_expiry_is_listed_when_it_blocks_a_caller(real_node: Any):
    """Something else wrote the key, and it would block the name for ever, so a refusal adds it to the index."""
    manager, server, prefix = real_node
    store = NodeState(time.time)
    store.put("{x}", "foreign", None)
    store.records.index.clear()
    with server.client() as client:
        client.set(f"{prefix}{{x}}:h", "foreign")
    request = Acquire(("{x}",), "a" * 32, "a" * 32, 60.0, BASE, None, 1e9)

    assert comparable(run(manager, request)) == comparable(store.execute(request))

    listed = run(manager, Survey(size=5))
    assert comparable(listed) == comparable(store.execute(Survey(size=5)))
    assert [row.slug for row in listed.rows] == ["{x}"]


@pytest.mark.parametrize("number", [0, BASE])
@pytest.mark.parametrize("present", [None, 7, 2**63 - 1])
def test_only_absurd_tokens_are_repaired(real_node: Any, present: int | None, number: int):
    """The node in memory and the script agree on which tokens are absurd, and on the result."""
    manager, server, prefix = real_node
    store, request = NodeState(time.time), Repair("{x}", number, 600.0)
    with server.client() as client:
        if present is not None:
            client.set(f"{prefix}{{x}}:f", present)
            store.records.fences["{x}"] = (present, None)

        assert run(manager, request).kind is store.execute(request).kind

        assert int(client.get(f"{prefix}{{x}}:f") or 0) == store.records.fence("{x}", store.now())
        assert (client.pttl(f"{prefix}{{x}}:f") > 0) is (store.records.fences.get("{x}", (0, None))[1] is not None)


def test_hold_is_released_where_the_token_is_absurd(real_node: Any):
    """A release that names no token ends the hold, whatever token the node has; otherwise, a refused attempt stays."""
    manager, server, prefix = real_node
    store, secret = NodeState(time.time), "a" * 32
    store.records.fences["{x}"] = (2**63 - 1, None)
    with server.client() as client:
        client.set(f"{prefix}{{x}}:f", 2**63 - 1)
    acquire, release = Acquire(("{x}",), secret, secret, 60.0, BASE, None, 1e9), Release(("{x}",), secret)
    run(manager, acquire)
    store.execute(acquire)

    assert comparable(run(manager, release)) == comparable(store.execute(release))
    assert store.records.holder("{x}", store.now()) is None


def test_tokens_near_the_limit_of_lua_numbers_keep_every_digit(real_node: Any):
    """A number with as many digits as 2**53 comes back unchanged, and a number that no clock can show is not a vote."""
    manager, *_ = real_node
    for number, kind, fence in ((2**52 + 1, Kind.ACCEPTED, 2**52 + 1), (2**53 - 1, Kind.EXCLUDED, 0)):
        reply = run(manager, Acquire(("{x}",), "a" * 32, "a" * 32, 60.0, number, None, 1e10))

        assert (reply.kind, reply.fence) == (kind, fence)


def test_place_of_somebody_away_is_kept(real_node: Any):
    """Whoever waits behind neither overtakes nor shortens its time, and its position is that without the holder."""
    manager, server, prefix = real_node
    away = take("x", "b", "p|1", away=600.0)
    behind = take("x", "c", "q|1", BASE + 1)

    store, _ = agree(real_node, [take("x"), away, behind, away, behind, Release(("{x}",), "a" * 32)])

    assert store.waiters("{x}") == ["p|1", "q|1"]
    with server.client() as client:
        assert client.zscore(f"{prefix}{{x}}:s", "p|1") == pytest.approx((time.time() + 600.0) * 1000, abs=10_000)
        assert all(client.pttl(f"{prefix}{{x}}:{key}") > 600_000 for key in "qs")
    for node in (store.execute, lambda request: run(manager, request)):
        refused = node(behind)
        assert (refused.kind, refused.position) == (Kind.QUEUED, 1)
        assert node(away).kind is Kind.GRANTED


def test_place_of_somebody_away_ends_with_its_time(real_node: Any):
    """The next one gets the free lock then."""
    manager, _, _ = real_node
    behind = take("x", "c", "q|1", BASE + 1)
    store, _ = agree(real_node, [take("x"), take("x", "b", "p|1", away=0.5), behind, Release(("{x}",), "a" * 32)])

    for node in (store.execute, lambda request: run(manager, request)):
        wait_until(lambda node=node: node(behind).kind is Kind.GRANTED)
