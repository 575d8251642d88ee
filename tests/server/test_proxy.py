"""The bad network: every fault does what it promises, and no more."""

import gc
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import redis

from django_redlock.testing import FaultProxy, Server, Servers
from tests.managers import wait_until

PATIENCE = 60.0  # seconds that a client waits for a reply that arrives
TIMEOUT = 0.2  # seconds that a client waits in vain


@pytest.fixture
def server(nodes: Servers) -> Server:
    return nodes[0]


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.url) as running:
        yield running


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[redis.Redis]:
    """A client behind the proxy that already has its connection."""
    with redis.Redis.from_url(proxy.url, socket_timeout=PATIENCE, decode_responses=True) as connected:
        connected.ping()
        yield connected


@pytest.fixture
def hasty(proxy: FaultProxy) -> Iterator[redis.Redis]:
    """Another client, which soon gives up."""
    with redis.Redis.from_url(proxy.url, socket_timeout=TIMEOUT, decode_responses=True) as connected:
        wait_until(lambda: answers(connected))
        yield connected


def answers(client: redis.Redis) -> bool:
    with suppress(redis.RedisError):
        return bool(client.ping())
    return False


@pytest.fixture
def direct(server: Server) -> Iterator[redis.Redis]:
    """A client that sees what the node really holds."""
    with server.client() as connected:
        yield connected


def best_of_many(work: Callable[[], object], least: float, most: float) -> bool:
    """
    Repeat *work* until it takes no longer than it should, because a busy machine may delay it; it must never take less.
    """
    for _ in range(200):
        began = time.monotonic()
        work()
        took = time.monotonic() - began
        assert took >= least
        if took < most:
            return True
    return False


@pytest.mark.parametrize(("direction", "expected"), [("requests", 0.05), ("replies", 0.05), ("both", 0.1)])
def test_delay_is_added_once_per_direction(proxy, client, direction, expected):
    """A round trip takes the delays of its two directions longer."""
    proxy.delay(0.05, direction)

    assert best_of_many(client.ping, expected, 2 * expected)


def test_black_hole_holds_requests_back(proxy, hasty, direct):
    """A request into a black hole reaches the node late, after its client has gone."""
    proxy.black_hole("requests")
    with pytest.raises(redis.TimeoutError):
        hasty.set("a", "1")
    hasty.close()
    assert direct.get("a") is None

    proxy.heal()

    wait_until(lambda: direct.get("a") == "1")


def test_black_hole_for_replies_lets_requests_through(proxy, hasty, direct):
    """The node executes a request, and the client does not know."""
    proxy.black_hole("replies")

    with pytest.raises(redis.TimeoutError):
        hasty.set("a", "1")

    assert direct.get("a") == "1"


def test_black_hole_accepts_connections(proxy):
    """A new client connects to a black hole, and waits for a reply in vain."""
    proxy.black_hole()

    with (
        redis.Redis.from_url(proxy.url, socket_timeout=TIMEOUT) as client,
        pytest.raises(redis.TimeoutError),
    ):
        client.ping()


def test_reset_breaks_connections_and_loses_what_was_underway(proxy, hasty, direct):
    """After a reset the client gets an error at once, and a request that was held back never arrives."""
    proxy.black_hole("requests")
    with pytest.raises(redis.TimeoutError):
        hasty.set("a", "1")

    proxy.reset()
    proxy.heal()

    wait_until(lambda: answers(hasty))
    assert direct.get("a") is None


@pytest.mark.parametrize(("reset", "error"), [(False, redis.TimeoutError), (True, redis.ConnectionError)])
def test_dropped_reply_belongs_to_a_request_carried_out(proxy, client, hasty, direct, reset, error):
    """The node executed the request and the client cannot know; the next connection works."""
    proxy.drop_next_reply(reset=reset)

    with pytest.raises(error):
        hasty.set("a", "1")

    assert direct.get("a") == "1"
    assert proxy.dropped == 1
    assert client.get("a") == "1"


def test_stopped_proxy_refuses_until_it_is_started(proxy, client):
    """A proxy that is stopped looks like a node that is down; its address stays."""
    url = proxy.url
    proxy.stop()
    proxy.stop()
    with pytest.raises(redis.ConnectionError):
        client.ping()

    proxy.start()

    assert proxy.url == url
    assert client.ping()


def test_node_that_is_down_is_down_behind_the_proxy(proxy, server):
    """When the node refuses, the client's connection is broken at once."""
    server.kill()

    with redis.Redis.from_url(proxy.url) as client, pytest.raises(redis.ConnectionError):
        client.ping()


def test_connections_left_in_a_black_hole_are_closed_after_it(proxy, server):
    """Connections of clients that gave up are kept while the fault lasts, and no longer."""
    proxy.black_hole()
    for _ in range(150):  # more than may wait to be accepted
        with socket.create_connection(("127.0.0.1", proxy.port)) as abandoned:
            abandoned.sendall(b"PING\r\n")
    wait_until(lambda: len(proxy._connections) == 150)

    proxy.heal()

    wait_until(lambda: not proxy._connections)
    with redis.Redis.from_url(proxy.url) as client:
        assert client.ping()


def test_connections_accepted_just_before_the_end_are_closed(proxy):
    """A proxy that stops during a burst of new connections leaves none open."""
    over = threading.Event()

    def connect() -> None:
        while not over.wait(0.001):
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", proxy.port), 1).close()

    with warnings.catch_warnings(record=True) as left_open:
        warnings.simplefilter("always", ResourceWarning)
        storm = [threading.Thread(target=connect) for _ in range(4)]
        for thread in storm:
            thread.start()
        for _ in range(20):
            proxy.stop()
            proxy.start()
        over.set()
        for thread in storm:
            thread.join()
        proxy.stop()
        gc.collect()

    assert [str(each.message) for each in left_open if "unclosed" in str(each.message)] == []
