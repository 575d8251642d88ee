"""
What the replies of a Redis or Valkey master mean, and what its failures are called.
"""

import errno
import json
import socket
import ssl
from typing import Any

from redis import exceptions

from ..core.admission import Greeting
from ..core.messages import ABSENT, Kind, Reply, Request, Row
from ..core.parts import many, merge, split
from .base import INCOMPLETE, LinkError

# redis-py drops the first word of an error that has a class of its own; which have one depends on its version.
ERROR_CLASSES: tuple[tuple[type[Exception], str], ...] = (
    (exceptions.BusyLoadingError, "LOADING"),
    (exceptions.ReadOnlyError, "READONLY"),
    (exceptions.NoPermissionError, "NOPERM"),
    (exceptions.OutOfMemoryError, "OOM"),
    (exceptions.MasterDownError, "MASTERDOWN"),  # before its base class, as MOVED
    (exceptions.ClusterDownError, "CLUSTERDOWN"),
    (exceptions.ClusterCrossSlotError, "CROSSSLOT"),
    (exceptions.TryAgainError, "TRYAGAIN"),
    (exceptions.MovedError, "MOVED"),
    (exceptions.AskError, "ASK"),
)
ERROR_WORDS = frozenset({
    "LOADING", "READONLY", "NOPERM", "OOM", "MASTERDOWN", "CLUSTERDOWN", "CROSSSLOT", "TRYAGAIN", "MOVED", "ASK",
    "BUSY", "MISCONF", "NOAUTH", "NOREPLICAS", "WRONGPASS", "WRONGTYPE",
})  # fmt: skip
# Errors that have no word, or lose it in every version of redis-py.
ERROR_PHRASES = (
    ("Authentication required", "NOAUTH"),
    ("invalid username-password pair", "WRONGPASS"),
    ("without any password configured", "has no password"),
    ("max number of clients", "max clients"),
    ("DB index is out of range", "no such database"),
)
# How the servers refuse a command inside a script, each version in its own words.
SCRIPT_PHRASES = ("ACL failure in script", "The user executing the script can't")

# What redis-py raises for error replies; the last two are connection errors to it.
ERROR_REPLIES = (exceptions.ResponseError, exceptions.BusyLoadingError, exceptions.AuthenticationError)
# What ends a connection; redis-py makes a ValueError of a length or number that is none.
BROKEN = (exceptions.RedisError, OSError, ValueError)

# How OpenSSL says that a certificate is good, but not for this host name or address.
WRONG_NAME = (62, 64)


def parse_answer(raw: Any, demoted: str) -> Reply | None:
    """
    Return the meaning of what a node answered to a request; None if it does not know the script.

    Raises:
        LinkError: It is no master any more; a new connection tells when it is one again. *demoted* is what to say.
    """
    if not isinstance(raw, exceptions.RedisError):
        return parse_reply(raw)
    if isinstance(raw, exceptions.NoScriptError):
        return None
    reply = parse_error(raw)
    if reply.detail in ("READONLY", "MASTERDOWN"):
        raise LinkError(demoted or reply.detail)
    return reply


def parse_reply(raw: Any) -> Reply:
    """Return the meaning of a script's reply; anything but a well-formed one is no vote."""
    try:
        if isinstance(raw, list):
            return parse_survey([part.decode("utf-8", "replace") for part in raw])
        word, fence, time, left, place, detail = raw.decode("utf-8", "replace").split(" ", 5)
        kind = KINDS[word]
        if kind in EXTENSIONS:
            return Reply(kind, int(fence), int(time), terms=tuple(map(parse_term, detail.split())))
        return Reply(kind, int(fence), int(time), seconds_left(left), detail, int(place))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Reply(Kind.UNKNOWN, detail="malformed reply")


KINDS = {kind.name: kind for kind in Kind}
LONGEST_TOKEN = 16  # digits of 2 ** 53, beyond which the scripts cannot count
HIGHEST, LONGEST_NUMBER = 2**53 - 1, 16
EXTENSIONS = frozenset({Kind.HELD, Kind.MIXED, Kind.REFUSED})


def parse_term(said: str) -> tuple[Kind, int]:
    """Return what became of one lease of an extension, and its fence."""
    return {"H": Kind.HELD, "R": Kind.REFUSED, "S": Kind.REVOKED}[said[0]], int(said[1:])


def parse_survey(parts: list[str]) -> Reply:
    """Return the locks that a survey reports."""
    kind, fence, time, total, said, lines, refused, cursor = parts
    cells, queues = json.loads(said, strict=False), json.loads(lines, strict=False)
    parsed = tuple(
        [
            Row(slug, value, seconds_left(pttl), token(number))
            for slug, value, pttl, number in zip(cells[::4], cells[1::4], cells[2::4], cells[3::4], strict=True)
        ]
    )
    if queues:
        line = zip(parsed, queues[::2], queues[1::2], strict=True)
        parsed = tuple(
            [
                row._replace(waiters=tuple(names.split(" ")) if names else (), waiting=count)
                for row, count, names in line
            ]
        )
    detail = parse_error(exceptions.ResponseError(refused)).detail if refused else ""
    return Reply(KINDS[kind], int(fence), int(time), detail=detail, rows=parsed, total=int(total), cursor=cursor)


def token(text: str) -> int:
    """Return a fencing token; 0 if it is none, because anybody can write one key and must not hide the others."""
    return int(text) if text.isdecimal() and len(text) <= LONGEST_TOKEN else 0


def seconds_left(pttl: str | int) -> float | None:
    """Return a PTTL in seconds: None for a key without expiry, ``ABSENT`` for no key."""
    value = int(pttl)
    return None if value == -1 else ABSENT if value == -2 else value / 1000


def parse_error(error: exceptions.RedisError) -> Reply:
    """
    Return what an error reply means: no vote, and which error.

    The scripts read every key before they write, so nothing was written when a known error came; except that a
    command inside a script is refused only when its turn comes.
    """
    if any(phrase in str(error) for phrase in SCRIPT_PHRASES):
        return Reply(Kind.UNKNOWN, detail="NOPERM")
    word = error_word(error)
    return Reply(Kind.FAILED, detail=word) if word else Reply(Kind.UNKNOWN, detail="error reply")


def error_word(error: Exception) -> str:
    """Return the word that tells an error reply, or nothing; the rest of it may name keys and users."""
    for kind, word in ERROR_CLASSES:
        if isinstance(error, kind):
            return word
    text = str(error)
    for phrase, word in ERROR_PHRASES:
        if phrase in text:
            return word
    if not isinstance(error, ERROR_REPLIES):
        return ""
    # Redis 6.2 puts the error of a command inside a script behind "ERR Error running script ...: -".
    words = (word.lstrip("-") for word in text.replace(":", " ").split())
    return next((word for word in words if word in ERROR_WORDS), "")


def parse_greeting(raw: Any, served: Any) -> Greeting:
    """
    Return what a node's INFO says that matters to a vote.

    Args:
        raw: The reply to INFO.
        served: The reply of the script that says for how long the server has served these locks.

    Raises:
        LinkError: It cannot be used, now or at all.
    """
    if isinstance(raw, exceptions.NoPermissionError):
        return Greeting(refused="NOPERM")
    if isinstance(raw, exceptions.RedisError):
        raise LinkError(parse_error(raw).detail)
    if not isinstance(raw, bytes) or b"run_id:" not in raw:
        raise LinkError("malformed reply")
    lines = raw.decode("utf-8", "replace").splitlines()
    info = dict(line.split(":", 1) for line in lines if ":" in line)
    mode = info.get("redis_mode", info.get("server_mode", "standalone"))
    if mode != "standalone":
        raise LinkError(f"runs in {mode} mode")
    if info.get("role") == "slave":
        raise LinkError("is a replica")
    evicts = info.get("maxmemory", "0") != "0" and info.get("maxmemory_policy", "noeviction") != "noeviction"
    return Greeting(
        run_id=info["run_id"],
        age=parse_age(served, info["run_id"]),
        evicts=evicts,
        promoted=info.get("master_replid", "?") if info.get("second_repl_offset", "-1") != "-1" else "",
    )


def parse_age(raw: Any, run_id: str) -> float | None:
    """
    Return for how many seconds the server with this *run_id* has served these locks; None if it did not say.

    Raises:
        LinkError: It is loading its data, it has become a replica, or another server answered.
    """
    if isinstance(raw, exceptions.RedisError):
        detail = parse_error(raw).detail
        if detail == "LOADING":
            raise LinkError(detail)  # it will be able to say soon, and this connection is not asked again
        if detail in ("READONLY", "MASTERDOWN"):
            raise LinkError("is a replica")
        return None
    try:
        word, run, age = raw.decode().split(" ")
        seconds = whole(age) / 1e6
    except (ValueError, AttributeError):
        return None
    if run != run_id:
        raise LinkError("answers as two servers")
    return seconds if word == "SERVED" else None


def whole(text: str) -> int:
    """
    Return the number that *text* is, from 0 to 2^53 - 1.

    Raises:
        ValueError: It is none.
    """
    if not (text.isascii() and text.isdigit()) or len(text) > LONGEST_NUMBER or int(text) > HIGHEST:
        raise ValueError("no number")
    return int(text)


def check_subscription(raw: Any) -> None:
    """
    Check that a channel has been subscribed to.

    Raises:
        LinkError: It has not; an ACL may forbid it.
    """
    if not isinstance(raw, list):
        raise LinkError(describe(raw) if isinstance(raw, exceptions.RedisError) else "malformed reply")


def describe(error: BaseException) -> str:
    """Return a few words for a failure to connect, send or receive; never what the error quotes."""
    if isinstance(error, LinkError):
        return error.detail
    if isinstance(error, (exceptions.TimeoutError, TimeoutError)):
        return "timeout"
    if isinstance(error, exceptions.RedisError) and (word := error_word(error)):
        return word
    # redis-py raises an error of its own in place of the one that tells what happened.
    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    known = next(filter(None, map(describe_cause, causes)), "")
    return known or ("closed" if "closed" in str(error).lower() else "unreachable")


def describe_cause(error: BaseException) -> str:
    """Return a few words for an error of the operating system or of TLS, or nothing."""
    match error:
        case ssl.SSLCertVerificationError():
            name = error.verify_code in WRONG_NAME
            return "has a certificate for another host" if name else f"certificate refused, {error.verify_message}"
        case ssl.SSLError():
            wanted = "CERTIFICATE_REQUIRED" in (error.reason or "")
            return "wants a client certificate" if wanted else "TLS failed"
        case socket.gaierror():
            return "unknown host"
        case FileNotFoundError():
            return "no such file"
        case ConnectionRefusedError():
            return "refused"
        case ConnectionError():
            return "reset"
        case ValueError() | exceptions.InvalidResponse():
            return "malformed reply"
    return "refused" if f"Errno {errno.ECONNREFUSED}" in str(error) else ""


class Assembly:
    """Puts the replies to the parts of a request together, as they come."""

    def __init__(self) -> None:
        self._replies: list[Reply | None] = []

    def add(self, request: Request, reply: Reply | None) -> Reply | None:
        """Take a reply, None for a script that is unknown; returns what came of the whole, or ``INCOMPLETE``."""
        if not many(request):
            return reply
        self._replies.append(reply)
        if len(self._replies) < len(split(request)):
            return INCOMPLETE
        replies, self._replies = self._replies, []
        known = [one for one in replies if one is not None]
        return merge(known) if len(known) == len(replies) else None
