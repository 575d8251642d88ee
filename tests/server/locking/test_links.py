"""A link: many requests of one turn of an event loop, its end, what it leaves behind, and scripts that are unknown."""

import asyncio
import time

import pytest

from django_redlock.core.admission import Greeting
from django_redlock.core.protocol import Acquire, Kind, Reply
from django_redlock.nodes import NodeSpec
from django_redlock.nodes.backends import open_node
from django_redlock.nodes.base import INCOMPLETE, Link, LinkError
from django_redlock.nodes.redis.link import CROWD, AsyncRedisLink, Introduction
from django_redlock.runtime.poll import READABLE, poller
from django_redlock.testing import Servers
from tests.managers import eventually

CALLS = 3 * CROWD


async def link_to(nodes: Servers) -> AsyncRedisLink:
    link = await open_node(NodeSpec(nodes[0].url), "t:").aconnect(1.0)
    assert isinstance(link, AsyncRedisLink)
    return link


def acquire(number: int) -> Acquire:
    """Request a name with its own token, so that each reply shows its request."""
    return Acquire((f"{{{number}}}",), f"{number:032}", f"{number:032}", 60.0, time.time_ns() // 1000, 600.0, 600.0)


class Told:
    """Collects the replies to requests that were sent together."""

    def __init__(self, link: AsyncRedisLink) -> None:
        self.replies: dict[int, Reply] = {}
        self.numbers = [acquire(number) for number in range(CALLS)]
        for number, request in enumerate(self.numbers):
            link.send(request, {}, lambda reply, number=number: self._take(number, reply))

    def _take(self, number: int, reply: Reply | None) -> bool:
        if reply is not None:
            assert number not in self.replies
            self.replies[number] = reply
        return True

    @property
    def all(self) -> bool:
        return len(self.replies) == CALLS


async def test_requests_of_one_turn_are_all_answered(nodes: Servers):
    """Each reply goes to its sender, also if the server has forgotten its scripts."""
    link = await link_to(nodes)

    for _ in range(2):
        told = Told(link)
        await eventually(lambda told=told: told.all)

        assert {reply.kind for reply in told.replies.values()} == {Kind.ACCEPTED}
        assert [told.replies[number].fence for number in range(CALLS)] == [request.number for request in told.numbers]
        with nodes[0].client() as client:
            client.delete(*(key for key in client.scan_iter() if not key.endswith("served")))
            client.script_flush()
    link.close()


async def test_link_that_is_dropped_has_sent_what_was_given_to_it(nodes: Servers):
    """A release that a cancelled task has handed to the link reaches the node, although nobody waits for the reply."""
    link = await link_to(nodes)

    told = Told(link)
    link.close()

    assert {(reply.kind, reply.detail) for reply in told.replies.values()} == {(Kind.UNKNOWN, "closed")}
    assert told.all
    with pytest.raises(LinkError):
        link.send(told.numbers[0], {}, lambda reply: True)
    with nodes[0].client() as client:
        await eventually(lambda: len(client.keys("t:*:h")) == CALLS)


async def test_connection_that_breaks_fails_all_its_requests(nodes: Servers):
    """If a connection breaks, nobody knows whether its requests were executed."""
    link = await link_to(nodes)
    nodes[0].freeze()
    told = Told(link)
    await asyncio.sleep(0)
    nodes[0].kill()
    await eventually(lambda: told.all)

    assert link.broken
    assert {reply.kind for reply in told.replies.values()} == {Kind.UNKNOWN}
    nodes[0].start()


async def test_connection_that_ended_before_it_was_taken_over_is_noticed(nodes: Servers):
    """redis-py's reader, which saw the end, is no longer used; the link would wait for ever."""
    node = open_node(NodeSpec(nodes[0].url), "t:")
    connection = node.connector.new_async(1.0)
    await connection.connect()
    with nodes[0].client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    reader = connection._reader
    await eventually(reader.at_eof)

    with pytest.raises(LinkError, match="closed"):
        AsyncRedisLink(connection, node.encoder, Introduction(node.encoder, node.describe, Greeting()))

    await connection.disconnect(nowait=True)


def answer(link: Link, request: Acquire) -> Reply | None:
    """Send a request by its digest and return the reply, None for that of a server that does not know the script."""
    link.send(request, {})
    poll = poller()
    poll.register(link.fileno(), READABLE)
    while (reply := link.receive(request)) is INCOMPLETE:
        assert poll.poll(60_000)
    return reply


def test_unknown_script_is_sent_with_the_next_request(nodes: Servers):
    """A node that forgot its scripts and replies too late to be asked again learns them from the next request."""
    link = open_node(NodeSpec(nodes[0].url), "t:").connect(1.0)
    before = answer(link, acquire(0))
    with nodes[0].client() as client:
        client.script_flush()

    first, second, third = [answer(link, acquire(number)) for number in (1, 2, 3)]

    assert first is None
    assert [each and each.kind for each in (before, second, third)] == [Kind.ACCEPTED] * 3
    link.close()


async def test_unknown_script_is_sent_with_the_next_request_of_an_event_loop(nodes: Servers):
    """The same if no task waits for the reply any more."""
    link = await link_to(nodes)
    replies: list[Reply | None] = []

    for number in range(4):
        if number == 1:
            with nodes[0].client() as client:
                client.script_flush()
        link.send(acquire(number), {}, lambda reply: bool(replies.append(reply)))
        await eventually(lambda number=number: len([each for each in replies if each]) > number)

    assert [each and each.kind for each in replies] == [Kind.ACCEPTED, None, Kind.FAILED, Kind.ACCEPTED, Kind.ACCEPTED]
    link.close()
