"""The bad network: every fault does what it promises, and no more."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


@pytest.mark.parametrize(("direction", "expected"), [("requests", 0.05), ("both", 0.1)])
def test_delay_is_added_once_per_direction(proxy, client, direction, expected):
    """A round trip takes the delays of its directions longer, never less, and hardly more if the machine is idle."""
    proxy.delay(0.05, direction)
    for _ in range(200):
        began = time.monotonic()
        client.ping()
        took = time.monotonic() - began
        assert took >= expected
        if took < 2 * expected:
            return
    pytest.fail("no round trip was as fast as it should be")


def test_delayed_bytes_arrive_when_the_network_heals(proxy, client, direct):
    """Nobody waits for the rest of a delay, and bytes that are sent later have none."""
    proxy.delay(3600, "replies")
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(client.set, "a", "1")
        wait_until(lambda: direct.get("a") == "1")

        proxy.heal()

        assert written.result(PATIENCE)
    assert client.ping()


def test_black_hole(proxy, hasty, direct):
    """A black hole for requests holds them back, late or for ever; one for replies lets requests through."""

    def write_in_vain(key: str, direction: str) -> None:
        wait_until(lambda: answers(hasty))  # connected before the fault, so that the request itself meets it
        proxy.black_hole(direction)
        with pytest.raises(redis.TimeoutError):
            hasty.set(key, "1")
        hasty.close()

    write_in_vain("through", "replies")
    assert direct.get("through") == "1"
    proxy.heal()

    write_in_vain("late", "requests")
    assert direct.get("late") is None
    proxy.heal()
    wait_until(lambda: direct.get("late") == "1")

    write_in_vain("never", "requests")
    proxy.reset()
    proxy.heal()
    wait_until(lambda: answers(hasty))
    assert direct.get("never") is None


@pytest.mark.parametrize(("reset", "error"), [(False, redis.TimeoutError), (True, redis.ConnectionError)])
def test_dropped_reply_belongs_to_a_request_carried_out(proxy, client, hasty, direct, reset, error):
    """The node executed the request and the client cannot know; the next connection works."""
    proxy.drop_next_reply(reset=reset)

    with pytest.raises(error):
        hasty.set("a", "1")

    assert direct.get("a") == "1"
    assert proxy.dropped == 1
    assert client.get("a") == "1"


def test_proxy_that_is_stopped_looks_like_a_node_that_is_down(proxy, client, server):
    """A stopped proxy refuses until it is started, at the same address; a node that is down is down behind it."""
    url = proxy.url
    proxy.stop()
    proxy.stop()
    with pytest.raises(redis.ConnectionError):
        client.ping()

    proxy.start()

    assert proxy.url == url
    assert client.ping()
    server.kill()
    with pytest.raises(redis.ConnectionError):
        client.ping()
