"""
Replies of a node, decided on their bytes.
"""

import pytest

from django_redlock.core.protocol import HIGHEST, PART, Acquire, Kind, Raise, Release, Reply, Request
from django_redlock.nodes.redis.wire import COMMON, common_reply, parse_reply

NUMBER, NOW = 1_795_000_000_000_000, 1_795_000_000_123_456
ACQUIRE = Acquire(("{a}",), "n" * 32, "n" * 32 + "{}", 30.0, NUMBER, None, 30.0)
RELEASE = Release(("{a}",), "n" * 32)
ACCEPTED, RELEASED = f"ACCEPTED {NUMBER} {NOW} 0 -1 ", f"RELEASED 0 {NOW} 0 -1 "
MANY = tuple(f"{{{number}}}" for number in range(PART + 1))


def read(request: Request, said: str) -> Reply | None:
    """Return the reply that the bytes of a string stand for, None if they are not one of the common replies."""
    found = COMMON.fullmatch(b"$%d\r\n%b\r\n" % (len(said), said.encode()))
    return common_reply(request, found) if found else None


@pytest.mark.parametrize(("request_", "said"), [(ACQUIRE, ACCEPTED), (RELEASE, RELEASED)], ids=["granted", "released"])
def test_common_replies_are_read_as_all_others_are(request_: Request, said: str):
    """The short way and the long way to read a reply give the same."""
    assert read(request_, said) == parse_reply(said.encode())


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (ACQUIRE, RELEASED),
        (RELEASE, ACCEPTED),
        (ACQUIRE._replace(number=NUMBER - 1), ACCEPTED),
        (Raise(("{a}",), "n" * 32, NUMBER, None), RELEASED),
        (ACQUIRE._replace(slugs=MANY), ACCEPTED),
        (RELEASE._replace(slugs=MANY), RELEASED),
        (ACQUIRE, f"ACCEPTED {NUMBER} {HIGHEST + 1} 0 -1 "),
        (ACQUIRE, f"ACCEPTED {NUMBER} 0{NOW} 0 -1 "),
        (ACQUIRE, f"GRANTED {NUMBER} {NOW} 0 -1 "),
        (RELEASE, f"GONE 0 {NOW} 0 -1 "),
    ],
)
def test_everything_else_takes_the_long_way(request_: Request, said: str):
    """A reply to another request or to a part of one, or with impossible numbers, is read in full."""
    assert read(request_, said) is None


def test_kinds_of_the_common_replies():
    """The two replies to a lock that nobody else wants."""
    assert read(ACQUIRE, ACCEPTED) == Reply(Kind.ACCEPTED, NUMBER, NOW)
    assert read(RELEASE, RELEASED) == Reply(Kind.RELEASED, 0, NOW)
