"""Replies are read from a stream of bytes, however it was cut; malformed replies are detected."""

import sys
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_redlock.nodes.redis.wire import LONGEST_LINE, MOST_PARTS, PARTIAL, Replies


def depth(reply: Any) -> int:
    return 1 + max(map(depth, reply), default=0) if isinstance(reply, list) else 0


strings = st.none() | st.binary(max_size=40)
lines = st.text(st.characters(codec="ascii", exclude_characters="\r\n"), max_size=20)
plain = strings | st.integers(-(2**63), 2**63 - 1) | lines.map(ValueError)
wanted = st.recursive(plain, lambda inner: st.lists(inner, max_size=4), max_leaves=6).filter(lambda it: depth(it) <= 8)


def said(reply: Any) -> bytes:
    """Encode a reply as a server does."""
    match reply:
        case None:
            return b"$-1\r\n"
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case int():
            return b":%d\r\n" % reply
        case ValueError():
            return f"-{reply}\r\n".encode()
        case _:
            return b"*%d\r\n%b" % (len(reply), b"".join(map(said, reply)))


def shown(reply: Any) -> Any:
    """Return a comparable form of a reply, because two exceptions are never equal."""
    if isinstance(reply, list):
        return [shown(part) for part in reply]
    return f"-{reply}" if isinstance(reply, Exception) else reply


def read_all(replies: Replies, data: bytes) -> list[Any]:
    replies.feed(data)
    found = []
    while (reply := replies.next()) is not PARTIAL:
        found.append(reply)
    return found


@given(st.lists(wanted, max_size=6), st.lists(st.integers(0, 400)))
def test_replies_are_the_same_however_the_stream_was_cut(sent: list[Any], cuts: list[int]):
    stream = b"".join(map(said, sent))
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    replies = Replies(ValueError)

    read = [reply for start, end in pairwise(edges) for reply in read_all(replies, stream[start:end])]

    assert list(map(shown, read)) == list(map(shown, sent))


@given(wanted)
def test_incomplete_reply_is_not_returned(sent: Any):
    replies, stream = Replies(ValueError), said(sent)

    for byte in stream[:-1]:
        assert read_all(replies, bytes([byte])) == []

    assert [shown(reply) for reply in read_all(replies, stream[-1:])] == [shown(sent)]


@given(st.binary(max_size=60))
def test_noise_is_read_or_refused_and_nothing_else(noise: bytes):
    with suppress(ValueError):
        read_all(Replies(ValueError), noise)


@pytest.mark.parametrize(
    "malformed",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
        b"_\r\n",
        b"$x\r\n",
        b"$\r\n",
        b"$-2\r\n",
        b"$1_0\r\n",
        b"$+1\r\na\r\n",
        b"$1\r\nab\r\n",
        b"$%s\r\n" % (b"9" * 5000),
        b":one\r\n",
        b"*x\r\n",
        b"*-2\r\n",
        b"*1\r\n" * 9,
        b"*2\r\n$1\r\na\r\n!",
        b"+" * (LONGEST_LINE + 2),
    ],
)
def test_malformed_reply_is_refused(malformed: bytes):
    """Everything after it would be misread as well, and given to the wrong round."""
    replies = Replies(ValueError)
    assert read_all(replies, b"$2\r\nok\r\n") == [b"ok"]

    with pytest.raises(ValueError, match=r"no |a line|a string|lists|invalid literal|Exceeds"):
        read_all(replies, malformed)


def test_reply_has_few_parts_in_all_of_its_lists():
    """A thousand lists of a thousand parts each would keep a client busy, although no list is too long."""
    inner = b"*1000\r\n" + 1000 * b"*0\r\n"
    replies = Replies(ValueError)
    replies.feed(b"*1000\r\n" + MOST_PARTS // 1000 * inner)

    with pytest.raises(ValueError, match="a list without end"):
        replies.next()


@pytest.mark.parametrize("part", [b"*2\r\n$3\r\nabc\r\n:1\r\n", b"$60\r\n" + 60 * b"x" + b"\r\n"])
def test_time_to_read_a_reply_is_proportional_to_its_length(part: bytes):
    """A reply of nested lists that arrives in many pieces is not read from its beginning again for each of them."""
    few, many = (calls_to_read(b"*%d\r\n" % count + count * part) for count in (100, 900))

    assert 5 * few < many < 11 * few


def calls_to_read(stream: bytes) -> int:
    """Return how many functions are called to read one reply that arrives in pieces of 100 bytes."""
    replies, calls = Replies(ValueError), [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    sys.setprofile(count)
    try:
        found = [reply for at in range(0, len(stream), 100) for reply in read_all(replies, stream[at : at + 100])]
    finally:
        sys.setprofile(None)
    assert len(found) == 1
    return calls[0]
