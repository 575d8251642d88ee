"""The bounds of a connection to a member, in bytes and in time."""

import socket
from collections.abc import Iterator

import pytest

from django_redlock.contrib.consensus.bounded import LAST_READS, READ, BoundedSocket, TooMuchError


@pytest.fixture
def ends() -> Iterator[tuple[BoundedSocket, socket.socket]]:
    """The client's end of a connection, and the member's."""
    ours, theirs = socket.socketpair()
    with BoundedSocket(fileno=ours.detach()) as client, theirs:
        client.settimeout(10.0)
        yield client, theirs


def test_more_bytes_than_were_allowed(ends: tuple[BoundedSocket, socket.socket]):
    """Every read counts more than its bytes, so that small pieces are no way around the bound."""
    client, member = ends
    client.allow(2 * READ + 2)
    member.sendall(b"abc")
    assert client.recv_into(bytearray(2)) == 2
    with pytest.raises(TooMuchError):
        client.recv_into(bytearray(2))

    client.allow(2 * READ)
    with pytest.raises(TooMuchError):
        client.recv(2 * READ + 1)  # kazoo knows the size of a packet before it has come


def test_bytes_that_come_after_the_time(ends: tuple[BoundedSocket, socket.socket]):
    """What has arrived is read, for a few reads, and nothing is waited for; the next reply has a time of its own."""
    client, member = ends
    client.allow(100_000, -1.0)
    member.sendall(b"x" * 10)
    assert [client.recv(1) for _ in range(LAST_READS)] == [b"x"] * LAST_READS
    with pytest.raises(TimeoutError):
        client.recv(1)

    client.allow(100_000)
    assert client.recv(100) == b"x" * (10 - LAST_READS)


def test_member_that_sends_nothing(ends: tuple[BoundedSocket, socket.socket]):
    """A read waits until its time has passed, and no longer."""
    client, _ = ends
    client.allow(100_000, 0.01)

    with pytest.raises(TimeoutError):
        client.makefile("rb").readline()
