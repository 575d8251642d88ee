"""
Requests to a node: the bytes of a command.
"""

from hypothesis import given
from hypothesis import strategies as st
from redis.connection import Connection

from django_redlock.core.protocol import Acquire, Release, Request
from django_redlock.nodes.redis.wire import SCRIPTS, Encoder, resp

CONNECTION = Connection()
words = st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=12)


@given(words)
def test_bytes_are_those_of_redis_py(words: list[str]):
    """Every word has its length in bytes in front, whatever characters it has."""
    packed = b"".join(CONNECTION.pack_command("EVAL", *words))

    assert resp(["EVAL", *words]) == packed


@given(st.text(st.characters(codec="utf-8"), max_size=30), st.booleans(), st.sampled_from(["", "{queue}"]))
def test_scripts_get_their_words_whatever_characters_they_have(text: str, shared: bool, queue: str):
    """A name, a label or the value of another program may have any character; lengths are those of the bytes."""
    slug, encoder = f"{{{text}}}", Encoder("é:")
    acquire = Acquire((slug,), "n" * 32, f"{text}{{}}", 30.0, 1, None, 30.0, waiter=text, shared=shared, queue=queue)
    release = Release((slug,), text, 2.0, text, shared, queue)
    for request, ends in ((acquire, "hfqsr" if shared else "hfqs"), (release, "hqsr" if shared else "hqs")):
        words = read(encoder.pack(request, {}, False))
        keys = [f"é:{queue if queue and end in 'qs' else slug}:{end}" for end in ends]
        assert words[:2] == ["EVALSHA", SCRIPTS[type(request)].sha]
        assert words[2 : 5 + len(ends)] == [str(2 + len(ends)), "é:index", f"é:x:{request.secret}", *keys]
    assert words[5 + len(ends) :] == [text, text, str(2**53 - 1), "é:", "2000", "1" if shared else "", ""]


def read(command: bytes) -> list[str]:
    """Return the words of one command, as a server reads them."""
    head, _, rest = command.partition(b"\r\n")
    words = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size[1:])
        assert rest[length : length + 2] == b"\r\n"
        words.append(rest[:length].decode())
        rest = rest[length + 2 :]
    assert head == b"*%d" % len(words)
    return words


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
    """The keys of a cluster have braces around the prefix, and no other node of a round may be sent them."""
    request: Request = Acquire(("{a}",), "n" * 32, "n" * 32 + "{}", 30.0, 1, None, 30.0)
    plain, tagged, packed = Encoder("redlock:"), Encoder("{redlock}:", shares=False), dict[int, bytes]()

    sent = [encoder.pack(request, packed, False) for encoder in (plain, tagged, plain)]

    assert [b"\r\n{redlock}:{a}:h\r\n" in each for each in sent] == [False, True, False]
    assert [b"\r\nredlock:{a}:h\r\n" in each for each in sent] == [True, False, True]
