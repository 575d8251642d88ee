"""What goes over the wire to a Redis server: the bytes of a command, and what the bytes of a reply mean."""

import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.connection import Connection

from django_redlock.core.protocol import (
    FAR,
    HIGHEST,
    PART,
    Acquire,
    Extend,
    Extended,
    Failure,
    Kind,
    Raise,
    Release,
    Reply,
    Request,
    Survey,
    Term,
    believable,
    failed,
)
from django_redlock.nodes.base import Packed
from django_redlock.nodes.redis.wire import (
    COMMON,
    LONGEST_LINE,
    LONGEST_LIST,
    LONGEST_REPLY,
    MOST_PARTS_OF_GUIDE,
    PARTIAL,
    Encoder,
    Replies,
    checked,
    common_reply,
    parse_reply,
    resp,
)

# Commands

words = st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=12)


@given(words)
def test_bytes_are_those_of_redis_py(words: list[str]):
    """Every word has its length in bytes in front, whatever characters it has."""
    packed = b"".join(Connection().pack_command("EVAL", *words))

    assert resp(["EVAL", *words]) == packed


def test_nodes_with_different_prefixes_do_not_share_bytes():
    """The keys of a cluster have braces around the prefix, and no other node of a round may be sent them."""
    request: Request = Acquire(("{a}",), "n" * 32, "n" * 32 + "{}", 30.0, 1, None, 30.0)
    plain, tagged, packed = Encoder("redlock:"), Encoder("{redlock}:", shares=False), Packed()

    sent = [encoder.pack(request, packed, False, b"") for encoder in (plain, tagged, plain)]

    assert [b"\r\n{redlock}:{a}:h\r\n" in each for each in sent] == [False, True, False]
    assert [b"\r\nredlock:{a}:h\r\n" in each for each in sent] == [True, False, True]


# The stream of replies


def error(text: str) -> tuple[str, str]:
    """Stand for an exception: two of those are never equal."""
    return "error", text


def depth(reply: Any) -> int:
    return 1 + max(map(depth, reply), default=0) if isinstance(reply, list) else 0


strings = st.none() | st.binary(max_size=40)
lines = st.text(st.characters(codec="ascii", exclude_characters="\r\n"), max_size=20)
plain = strings | st.integers(-(2**63), 2**63 - 1) | lines.map(error)
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
        case "error", text:
            return f"-{text}\r\n".encode()
        case _:
            return b"*%d\r\n%b" % (len(reply), b"".join(map(said, reply)))


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
    replies = Replies(error)

    read = [reply for start, end in pairwise(edges) for reply in read_all(replies, stream[start:end])]

    assert read == sent


@given(st.binary(max_size=60))
def test_noise_is_read_or_refused_and_nothing_else(noise: bytes):
    with suppress(ValueError):
        read_all(Replies(ValueError), noise)


@pytest.mark.parametrize(
    ("stream", "longest"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", LONGEST_REPLY),
        (b"$x\r\n", LONGEST_REPLY),
        (b"$-2\r\n", LONGEST_REPLY),
        (b"$1\r\nab\r\n", LONGEST_REPLY),
        (b":one\r\n", LONGEST_REPLY),
        (b"*-2\r\n", LONGEST_REPLY),
        (b"*1\r\n" * 9, LONGEST_REPLY),
        (b"*2\r\n$1\r\na\r\n!", LONGEST_REPLY),
        (b"+" * (LONGEST_LINE + 2), LONGEST_REPLY),
        # Too large, however it is put together: it is refused before it is read.
        (b"$%d\r\n" % (LONGEST_REPLY + 1), LONGEST_REPLY),
        (b"$" + b"9" * 5000 + b"\r\n", LONGEST_REPLY),
        (b"*%d\r\n" % (LONGEST_LIST + 1), LONGEST_REPLY),
        (b"*900\r\n" + 400 * b"$8\r\n12345678\r\n", 5000),
        (b"*1000\r\n" + MOST_PARTS_OF_GUIDE // 1000 * (b"*1000\r\n" + 1000 * b"*0\r\n"), LONGEST_REPLY),
    ],
    ids=lambda value: str(value)[:20],
)
def test_malformed_or_endless_reply_is_refused(stream: bytes, longest: int):
    """Everything after it would be misread as well, and given to the wrong round."""
    replies = Replies(ValueError, longest, MOST_PARTS_OF_GUIDE)
    assert read_all(replies, b"$2\r\nok\r\n") == [b"ok"]

    with pytest.raises(ValueError, match=r"without end|digits|no |a line|a string|lists|invalid literal|Exceeds"):
        read_all(replies, stream)


# What a reply means

NUMBER, NOW = 1_795_000_000_000_000, 1_795_000_000_123_456
SLUG, SECRET = "{a}", "a" * 32
ACQUIRE = Acquire((SLUG,), SECRET, SECRET + "{}", 30.0, NUMBER, None, 30.0)
RELEASE = Release((SLUG,), SECRET)
RAISE = Raise((SLUG,), SECRET, NUMBER, None)
EXTEND = Extend((Term((SLUG,), SECRET, SECRET, 30.0, NUMBER),), None)
MANY = tuple(f"{{{number}}}" for number in range(PART + 1))


def brief(request: Request, said: str) -> Reply | None:
    """Return the reply that the bytes of a string stand for, None if they are not one of the common replies."""
    found = COMMON.fullmatch(b"$%d\r\n%b\r\n" % (len(said), said.encode()))
    return common_reply(request, found) if found else None


@pytest.mark.parametrize(
    ("request_", "said", "common"),
    [
        (ACQUIRE, f"ACCEPTED {NUMBER} {NOW} 0 -1 ", True),
        (RELEASE, f"RELEASED 0 {NOW} 0 -1 ", True),
        (ACQUIRE, f"RELEASED 0 {NOW} 0 -1 ", False),
        (ACQUIRE._replace(number=NUMBER - 1), f"ACCEPTED {NUMBER} {NOW} 0 -1 ", False),
        (RAISE, f"RELEASED 0 {NOW} 0 -1 ", False),
        (ACQUIRE._replace(slugs=MANY), f"ACCEPTED {NUMBER} {NOW} 0 -1 ", False),
        (RELEASE._replace(slugs=MANY), f"RELEASED 0 {NOW} 0 -1 ", False),
        (ACQUIRE, f"ACCEPTED {NUMBER} {HIGHEST + 1} 0 -1 ", False),
    ],
)
def test_only_a_common_reply_to_its_own_request_is_read_in_the_short_way(request_: Request, said: str, common: bool):
    """The short way gives the same as the long one; other requests, parts and impossible numbers take the long one."""
    assert brief(request_, said) == (parse_reply(said.encode()) if common else None)


@pytest.mark.parametrize(
    ("request_", "reply", "sound"),
    [
        (ACQUIRE, Reply(Kind.ACCEPTED, NUMBER), True),
        (ACQUIRE, Reply(Kind.ACCEPTED, 6), False),
        (RAISE, Reply(Kind.ACCEPTED, 4), False),
        (EXTEND, Reply(Kind.ACCEPTED, NUMBER), False),
        (EXTEND, Reply(Kind.HELD, NUMBER), True),
        (ACQUIRE, Reply(Kind.HELD, NUMBER), False),
        (Survey((SLUG,)), Reply(Kind.GONE), False),
        (ACQUIRE, failed(Failure.OOM), True),
    ],
)
def test_reply_is_compared_with_what_was_asked(request_: Request, reply: Reply, sound: bool):
    """A node accepts the number that was proposed, or none; a reply to another request does not count."""
    assert (checked(request_, reply) is reply) is sound
    assert checked(request_, reply).kind in (reply.kind, Kind.UNKNOWN)


def survey(cells: Any = (), lines: Any = (), total: str = "1", time: str = "5") -> list[bytes]:
    parts = ["LISTED", "0", time, total, cells, lines, "", ""]
    return [(part if isinstance(part, str) else json.dumps(part)).encode() for part in parts]


NUMBERS = ["-5", "", "1e3", str(2**53), "9" * 5000, "٣", "1_000"]
MALFORMED = [
    # Only the client can know that a request was certainly not executed.
    *(f"{word} 5 5 0 -1 ".encode() for word in ("FAILED", "UNKNOWN", "NO_VOTE", "EXCLUDED")),
    # The bounds apply to the time and to the queue position.
    *(line.format(number).encode() for line in ("BUSY 5 {} 0 -1 x", "BUSY 5 5 0 {} x") for number in NUMBERS),
    survey([SLUG, "v", float("nan"), "5"]),
    survey([SLUG, "v", -7, "5"]),
    survey([SLUG, 5, 5, "5"]),
    survey([SLUG, "v", 5, 5]),
    survey([SLUG, "v", 5]),
    survey(["{\ud800}", "v", 5, "5"]),
    survey("[" * 100_000),
    survey([SLUG, "v", 5, "5"], [10**400, "", 0]),
    survey([SLUG, "v", 5, "5"], [0, "", -1]),
    survey(total="-1"),
    survey(time="1e9"),
    survey()[:-1],
]


@pytest.mark.parametrize("raw", MALFORMED, ids=range(len(MALFORMED)))
def test_reply_that_no_node_gives_is_malformed(raw: Any):
    """It does not raise an exception, and nothing is known of the request."""
    reply = parse_reply(raw)

    assert (reply.kind, reply.detail) == (Kind.UNKNOWN, "malformed reply")


@pytest.mark.parametrize("number", NUMBERS)
def test_token_that_is_no_number_is_absurd(number: str):
    """The reply is understood whatever the token is, and the number just above all others stands for it."""
    assert parse_reply(f"GRANTED {number} 5 0 -1 ".encode()).fence == HIGHEST + 1
    assert parse_reply(f"HELD 5 5 0 -1 H{number}".encode()).terms == (Extended(Kind.HELD, HIGHEST + 1),)
    [row] = parse_reply(survey([SLUG, "v", 9e18, number or "soon"])).rows
    assert (row.left, row.fence) == (HIGHEST / 1000, HIGHEST + 1)  # a key may last for thousands of years


@pytest.mark.parametrize("odd", ["", "-5", str(HIGHEST), "9" * 17, "1" * 15 + "²"])
def test_odd_row_of_a_survey_changes_no_other(odd: str):
    """The fields of a survey are read a column at a time, as if each were read alone."""
    usual = ["v", 1500, str(NUMBER)]
    alone = parse_reply(survey([SLUG, "v", -1, odd])).rows
    rows = parse_reply(survey(["{b}", *usual, SLUG, "v", -1, odd, "{c}", *usual])).rows

    assert rows[1:2] == alone
    assert (rows[0].left, rows[0].fence, rows[2][1:4]) == (1.5, NUMBER, rows[0][1:4])


def test_token_a_hundred_years_ahead_of_the_clock_is_absurd():
    """A token a hundred years ahead would leave no room for later ones; a token of another century is merely odd."""
    now = 1_800_000_000_000_000
    for fence, kind in ((now + FAR, Kind.GRANTED), (now + FAR + 1, Kind.EXCLUDED), (HIGHEST, Kind.EXCLUDED)):
        assert believable(Reply(Kind.GRANTED, fence, now)).kind is kind
    assert believable(Reply(Kind.GRANTED, 2**52, 0)).kind is Kind.GRANTED
    assert believable(Reply(Kind.GRANTED, HIGHEST, 0)).kind is Kind.EXCLUDED
