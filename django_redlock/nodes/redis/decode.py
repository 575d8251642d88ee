"""
What the replies of a Redis or Valkey master mean, and what its failures are called.
"""

import errno
import json
import socket
import ssl
from dataclasses import replace
from typing import Any, NamedTuple

from redis import exceptions

from ...core.admission import Greeting
from ...core.parts import many, merge, split
from ...core.replies import ABSENT, ABSURD, Kind, Reply, Row
from ...core.requests import HIGHEST, Acquire, Extend, Raise, Release, Repair, Request, Survey
from ..base import INCOMPLETE, LinkError

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

# What Lua says when a script compares a fencing token that is no number; they compare nothing else that others write.
COMPARED = "attempt to compare"

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
        # As token() and whole() do, which cost as much as the rest: this is read for every lock.
        if len(fence) == len(time) == LONGEST_NUMBER and (both := fence + time).isdigit() and both.isascii():
            number, now = int(fence), int(time)
        else:
            number, now = token(fence), whole(time)
        if now > HIGHEST:
            raise ValueError("no number")
        if kind in EXTENSIONS:
            return Reply(kind, number, now, terms=tuple(map(parse_term, detail.split())))
        return Reply(kind, number, now, seconds_left(left), detail, -1 if place == "-1" else whole(place))
    except MALFORMED:
        return Reply(Kind.UNKNOWN, detail="malformed reply")


# What comes of reading what is not what it should be; JSON may be nested too deeply, or hold a number without end.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
# What a node itself can say; the other kinds are the client's.
SAID = frozenset(Kind) - {Kind.NO_VOTE, Kind.EXCLUDED, Kind.FAILED, Kind.UNKNOWN}
KINDS = {kind.name: kind for kind in SAID}
EXTENSIONS = frozenset({Kind.HELD, Kind.MIXED, Kind.REFUSED})
LONGEST_NUMBER = 16  # digits of 2^53
EXPECTED: dict[type[Request], frozenset[Kind]] = {
    Acquire: frozenset({Kind.ACCEPTED, Kind.GRANTED, Kind.BUSY, Kind.QUEUED, Kind.CANCELLED}),
    Raise: frozenset({Kind.ACCEPTED, Kind.GRANTED, Kind.REFUSED}),
    Extend: EXTENSIONS,
    Release: frozenset({Kind.RELEASED, Kind.BUSY, Kind.GONE}),
    Survey: frozenset({Kind.LISTED}),
    Repair: frozenset({Kind.RELEASED, Kind.GONE}),
}


def checked(request: Request, reply: Reply) -> Reply:
    """Return *reply* if it can be one to *request*: what was accepted is what was proposed, and no other number."""
    kind = reply.kind
    if kind is Kind.ACCEPTED:
        sound = isinstance(request, (Acquire, Raise)) and reply.fence == request.number
    else:
        sound = kind in EXPECTED[type(request)] or kind in (Kind.FAILED, Kind.UNKNOWN)
    return reply if sound else Reply(Kind.UNKNOWN, detail="malformed reply")


def parse_term(said: str) -> tuple[Kind, int]:
    """Return what became of one lease of an extension, and its fence."""
    return {"H": Kind.HELD, "R": Kind.REFUSED, "S": Kind.REVOKED}[said[0]], token(said[1:])


def parse_survey(parts: list[str]) -> Reply:
    """Return the locks that a survey reports."""
    kind, fence, time, total, said, lines, refused, cursor = parts
    cells, queues = json.loads(said, strict=False), json.loads(lines, strict=False)
    parsed = tuple(
        [
            Row(text(slug), text(value), seconds_left(pttl), token(number))
            for slug, value, pttl, number in zip(cells[::4], cells[1::4], cells[2::4], cells[3::4], strict=True)
        ]
    )
    if queues:
        line = zip(parsed, queues[::2], queues[1::2], strict=True)
        parsed = tuple(
            [
                row._replace(waiters=tuple(names.split(" ")) if names else (), waiting=whole(str(count)))
                for row, count, names in line
            ]
        )
    detail = parse_error(exceptions.ResponseError(refused)).detail if refused else ""
    return Reply(KINDS[kind], token(fence), whole(time), detail=detail, rows=parsed, total=whole(total), cursor=cursor)


def text(value: object) -> str:
    """Return *value* if it is text, else raise TypeError."""
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def token(text: str) -> int:
    """Return a fencing token; what is no number, or too high for the scripts, is just above all that are."""
    if len(text) > LONGEST_NUMBER or not (text.isdigit() and text.isascii()):
        return HIGHEST + 1
    return min(int(text), HIGHEST + 1)


def seconds_left(pttl: str | float) -> float | None:
    """Return a PTTL in seconds: None for a key without expiry, ``ABSENT`` for no key."""
    value = min(int(pttl), HIGHEST)
    if value < -2:
        raise ValueError("no time left")
    return None if value == -1 else ABSENT if value == -2 else value / 1000


def parse_error(error: exceptions.RedisError) -> Reply:
    """
    Return what an error reply means: no vote, and which error.

    The scripts read every key before they write, so nothing was written when a known error came; except that a
    command inside a script is refused only when its turn comes.
    """
    text = str(error)
    if any(phrase in text for phrase in SCRIPT_PHRASES):
        return Reply(Kind.UNKNOWN, detail="NOPERM")
    if COMPARED in text:
        return Reply(Kind.UNKNOWN, detail=ABSURD)
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


def parse_info(raw: Any) -> Greeting:
    """
    Return what a node's INFO says that matters to a vote.

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
        evicts=evicts,
        promoted=info.get("master_replid", "?") if info.get("second_repl_offset", "-1") != "-1" else "",
    )


class Age(NamedTuple):
    """For how many seconds the server with a run id has served the locks; None if it does not say."""

    run_id: str = ""
    seconds: float | None = None


def parse_age(raw: Any) -> Age:
    """
    Return for how long a server has served these locks.

    Raises:
        LinkError: It loads its data, or has become a replica.
    """
    if isinstance(raw, exceptions.RedisError):
        detail = parse_error(raw).detail
        if detail == "LOADING":
            raise LinkError(detail)  # it will be able to say soon, and this connection is not asked again
        if detail in ("READONLY", "MASTERDOWN"):
            raise LinkError("is a replica")
        return Age()
    try:
        word, run_id, micros = raw.decode().split(" ")
        return Age(run_id, whole(micros) / 1e6) if word == "SERVED" else Age()
    except (ValueError, AttributeError):
        return Age()


def aged(greeting: Greeting, age: Age) -> Greeting:
    """
    Return *greeting* with the age.

    Raises:
        LinkError: They are those of two servers.
    """
    if greeting.run_id and age.run_id not in ("", greeting.run_id):
        raise LinkError("answers as two servers")
    return replace(greeting, age=age.seconds)


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
            # What is usual is looked at here: this is done for every lock.
            if reply is None or (reply.kind is not Kind.ACCEPTED and reply.kind in EXPECTED[type(request)]):
                return reply
            return checked(request, reply)
        self._replies.append(reply and checked(request, reply))
        if len(self._replies) < len(split(request)):
            return INCOMPLETE
        replies, self._replies = self._replies, []
        known = [one for one in replies if one is not None]
        return merge(known) if len(known) == len(replies) else None
