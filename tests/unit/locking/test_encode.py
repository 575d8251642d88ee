"""
Requests to a node: the bytes of a command.
"""

from hypothesis import given
from hypothesis import strategies as st
from redis.connection import Connection

from django_redlock.core.requests import Acquire, Request
from django_redlock.nodes.redis.encode import SCRIPTS, Encoder, resp

CONNECTION = Connection()
words = st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=12)


@given(words)
def test_bytes_are_those_of_redis_py(words: list[str]):
    """Every word has its length in bytes in front, whatever characters it has."""
    packed = b"".join(CONNECTION.pack_command("EVAL", *words))

    assert resp(["EVAL", *words]) == packed


def test_bytes_are_made_once_for_all_nodes():
    """A round sends the same bytes to every node; with and without the script's text are two versions."""
    request: Request = Acquire(("{a}",), "n" * 32, "n" * 32 + "{}", 30.0, 1, None, 30.0)
    encoder, packed = Encoder("redlock:"), dict[int, bytes]()

    brief, full = encoder.pack(request, packed, False), encoder.pack(request, packed, True)

    assert encoder.pack(request, packed, False) is brief
    assert encoder.pack(request, packed, True) is full
    assert SCRIPTS[Acquire].sha.encode() in brief
    assert SCRIPTS[Acquire].text.encode() in full


def test_nodes_with_different_prefixes_do_not_share_bytes():
    """L65: the keys of a cluster have braces around the prefix, and no other node of a round may be sent them."""
    request: Request = Acquire(("{a}",), "n" * 32, "n" * 32 + "{}", 30.0, 1, None, 30.0)
    plain, tagged, packed = Encoder("redlock:"), Encoder("{redlock}:", shares=False), dict[int, bytes]()

    sent = [encoder.pack(request, packed, False) for encoder in (plain, tagged, plain)]

    assert [b"\r\n{redlock}:{a}:h\r\n" in each for each in sent] == [False, True, False]
    assert [b"\r\nredlock:{a}:h\r\n" in each for each in sent] == [True, False, True]
