"""
Interpret the replies and the failures of a Redis or Valkey master (internal).
"""

import errno
import json
import socket
import ssl
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from redis import exceptions

from ...core.admission import Greeting
from ...core.protocol import (
    HIGHEST,
    Acquire,
    Extend,
    Failure,
    Kind,
    Raise,
    Release,
    Repair,
    Reply,
    Request,
    Row,
    Survey,
    failed,
    many,
    merge,
    split,
)
from ..base import INCOMPLETE, LinkError
from .wire import LONGEST_NUMBER, all_seconds_left, fencing_token, fencing_tokens, seconds_left, texts, whole

# redis-py drops the first word of an error that has a class of its own. Which errors have one depends on its version.
ERROR_CLASSES: tuple[tuple[type[Exception], Failure], ...] = (
    (exceptions.BusyLoadingError, Failure.LOADING),
    (exceptions.ReadOnlyError, Failure.READONLY),
    (exceptions.NoPermissionError, Failure.NOPERM),
    (exceptions.OutOfMemoryError, Failure.OOM),
    (exceptions.MasterDownError, Failure.MASTERDOWN),  # before its base class, like MOVED
    (exceptions.ClusterDownError, Failure.CLUSTERDOWN),
    (exceptions.ClusterCrossSlotError, Failure.CROSSSLOT),
    (exceptions.TryAgainError, Failure.TRYAGAIN),
    (exceptions.MovedError, Failure.MOVED),
    (exceptions.AskError, Failure.ASK),
)
ERROR_WORDS = {
    failure.value: failure
    for failure in (
        *(Failure.LOADING, Failure.READONLY, Failure.NOPERM, Failure.OOM, Failure.MASTERDOWN, Failure.CLUSTERDOWN),
        *(Failure.CROSSSLOT, Failure.TRYAGAIN, Failure.MOVED, Failure.ASK, Failure.BUSY, Failure.MISCONF),
        *(Failure.NOAUTH, Failure.NOREPLICAS, Failure.WRONGPASS, Failure.WRONGTYPE),
    )
}
# Errors without such a word, or that lose it in every version of redis-py.
ERROR_PHRASES = (
    ("Authentication required", Failure.NOAUTH),
    ("invalid username-password pair", Failure.WRONGPASS),
    ("without any password configured", Failure.NO_PASSWORD),
    ("max number of clients", Failure.MAX_CLIENTS),
    ("DB index is out of range", Failure.NO_SUCH_DATABASE),
    ("cluster support disabled", Failure.WRONG_MODE),
)
# How the servers refuse a command inside a script, each version in its own words.
SCRIPT_PHRASES = ("ACL failure in script", "The user executing the script can't")

# The error replies of a server that is no longer a master, and what to report for each.
DEMOTED: Mapping[Failure, Failure] = {each: each for each in (Failure.READONLY, Failure.MASTERDOWN)}

# Lua's error when a script compares a fencing token that is no number. Scripts compare nothing else that others write.
COMPARED = "attempt to compare"

# redis-py's exceptions for error replies; it counts the last two as connection errors.
ERROR_REPLIES = (exceptions.ResponseError, exceptions.BusyLoadingError, exceptions.AuthenticationError)
# The errors that end a connection. redis-py raises ValueError for a malformed length or number.
BROKEN = (exceptions.RedisError, OSError, ValueError)

# OpenSSL's codes for a certificate that is valid, but not for this host name or address.
WRONG_NAME = (62, 64)
EXPIRED = 10


def parse_answer(raw: Any, unserved: Mapping[Failure, Failure]) -> Reply | None:
    """
    Return the meaning of a node's answer to a request, or None if the node does not know the script.

    Args:
        raw: The answer.
        unserved: The errors of a server that no longer serves these locks, and what to report for each.

    Raises:
        LinkError: The answer is such an error; a new connection finds out which server serves the locks now.
    """
    if not isinstance(raw, exceptions.RedisError):
        return parse_reply(raw)
    if isinstance(raw, exceptions.NoScriptError):
        return None
    reply = parse_error(raw)
    if reply.failure and reply.failure in unserved:
        raise LinkError(unserved[reply.failure])
    return reply


def parse_reply(raw: Any) -> Reply:
    """Return the meaning of a script's reply; a malformed reply is no vote."""
    try:
        if isinstance(raw, list):
            return parse_survey([part.decode("utf-8", "replace") for part in raw])
        word, fence, time, left, position, detail = raw.decode("utf-8", "replace").split(" ", 5)
        kind = KINDS[word]
        # This repeats fencing_token() and whole(); calling them for every lock would cost as much as the rest.
        if len(fence) == len(time) == LONGEST_NUMBER and (both := fence + time).isdigit() and both.isascii():
            number, now = int(fence), int(time)
        else:
            number, now = fencing_token(fence), whole(time)
        if now > HIGHEST:
            raise ValueError("no number")
        if kind in EXTENSIONS:
            return Reply(kind, number, now, terms=tuple(map(parse_term, detail.split())))
        return Reply(kind, number, now, seconds_left(left), detail, -1 if position == "-1" else whole(position))
    except MALFORMED:
        return failed(Failure.MALFORMED, Kind.UNKNOWN)


# The errors of reading a malformed reply; JSON may be nested too deeply, or contain an infinite number.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
# The kinds that a node itself can reply; the client assigns the others.
REPLIED = frozenset(Kind) - {Kind.NO_VOTE, Kind.EXCLUDED, Kind.FAILED, Kind.UNKNOWN}
KINDS = {kind.name: kind for kind in REPLIED}
EXTENSIONS = frozenset({Kind.HELD, Kind.MIXED, Kind.REFUSED})
EXPECTED: dict[type[Request], frozenset[Kind]] = {
    Acquire: frozenset({Kind.ACCEPTED, Kind.GRANTED, Kind.BUSY, Kind.QUEUED, Kind.CANCELLED}),
    Raise: frozenset({Kind.ACCEPTED, Kind.GRANTED, Kind.REFUSED}),
    Extend: EXTENSIONS,
    Release: frozenset({Kind.RELEASED, Kind.BUSY, Kind.GONE}),
    Survey: frozenset({Kind.LISTED}),
    Repair: frozenset({Kind.RELEASED, Kind.GONE}),
}


def checked(request: Request, reply: Reply) -> Reply:
    """Return *reply* if it fits *request*: an accepted token must be the proposed one."""
    kind = reply.kind
    if kind is Kind.ACCEPTED:
        sound = isinstance(request, (Acquire, Raise)) and reply.fence == request.number
    else:
        sound = kind in EXPECTED[type(request)] or kind in (Kind.FAILED, Kind.UNKNOWN)
    return reply if sound else failed(Failure.MALFORMED, Kind.UNKNOWN)


def parse_term(result: str) -> tuple[Kind, int]:
    """Return the result for one lease of an extension, and the lease's fencing token."""
    return {"H": Kind.HELD, "R": Kind.REFUSED, "S": Kind.REVOKED}[result[0]], fencing_token(result[1:])


def parse_survey(parts: list[str]) -> Reply:
    """Return the locks that a survey reports."""
    kind, fence, time, total, rows, queued, refused, cursor = parts
    cells, queues = json.loads(rows, strict=False), json.loads(queued, strict=False)
    if len(cells) % 4:
        raise ValueError("a row that is cut")
    # A listing has thousands of rows, so their fields are checked column by column.
    slugs, values = texts(cells[::4]), texts(cells[1::4])
    parsed = tuple(map(Row, slugs, values, all_seconds_left(cells[2::4]), fencing_tokens(cells[3::4])))
    if queues:
        parsed = tuple(
            [
                Row(*row[:4], tuple(names.split(" ")) if names else (), whole(str(count)), whole(str(sharers)))
                for row, count, names, sharers in zip(parsed, queues[::3], queues[1::3], queues[2::3], strict=True)
            ]
        )
    detail = parse_error(exceptions.ResponseError(refused)).detail if refused else ""
    number = fencing_token(fence)
    return Reply(KINDS[kind], number, whole(time), detail=detail, rows=parsed, total=whole(total), cursor=cursor)


def parse_error(error: exceptions.RedisError) -> Reply:
    """
    Return what an error reply means: no vote, and which error.

    The scripts read every key before they write, so a known error means that nothing was written. The exception is a
    command inside a script: the server refuses it only when the script reaches it.
    """
    text = str(error)
    if any(phrase in text for phrase in SCRIPT_PHRASES):
        return failed(Failure.NOPERM, Kind.UNKNOWN)
    if COMPARED in text:
        return failed(Failure.ABSURD_TOKEN, Kind.UNKNOWN)
    known = failure_of(error)
    return failed(known) if known else failed(Failure.ERROR_REPLY, Kind.UNKNOWN)


def failure_of(error: Exception) -> Failure | None:
    """Return the failure that an error reply stands for, if known; the reply's text may name keys and users."""
    for kind, failure in ERROR_CLASSES:
        if isinstance(error, kind):
            return failure
    text = str(error)
    for phrase, failure in ERROR_PHRASES:
        if phrase in text:
            return failure
    if not isinstance(error, ERROR_REPLIES):
        return None
    # Redis 6.2 puts the error of a command inside a script behind "ERR Error running script ...: -".
    words = (word.lstrip("-") for word in text.replace(":", " ").split())
    return next((ERROR_WORDS[word] for word in words if word in ERROR_WORDS), None)


def parse_info(raw: Any, expected: str = "standalone") -> Greeting:
    """
    Return the part of a node's INFO that matters to a vote.

    Args:
        raw: The reply.
        expected: The mode in which the server must run.

    Raises:
        LinkError: The server cannot be used, now or at all.
    """
    if isinstance(raw, exceptions.NoPermissionError):
        return Greeting(refused="NOPERM")
    if isinstance(raw, exceptions.RedisError):
        raise link_error(raw)
    if not isinstance(raw, bytes) or b"run_id:" not in raw:
        raise LinkError(Failure.MALFORMED)
    mode = line_of(raw, "redis_mode", line_of(raw, "server_mode", "standalone"))
    if mode != expected:
        raise LinkError(Failure.WRONG_MODE, f"runs in {mode} mode")
    if line_of(raw, "role", "") == "slave":
        raise LinkError(Failure.REPLICA)
    evicts = line_of(raw, "maxmemory", "0") != "0" and line_of(raw, "maxmemory_policy", "noeviction") != "noeviction"
    return Greeting(
        run_id=line_of(raw, "run_id", ""),
        evicts=evicts,
        promoted=line_of(raw, "master_replid", "?") if line_of(raw, "second_repl_offset", "-1") != "-1" else "",
    )


def line_of(info: bytes, name: str, default: str) -> str:
    """Return the value of the line *name* of INFO: six searches take less time than reading all 200 lines."""
    begins = f"{name}:".encode()
    start = 0 if info.startswith(begins) else info.find(b"\n" + begins) + 1
    if not start and not info.startswith(begins):
        return default
    end = info.find(b"\n", start)
    return info[start + len(begins) : end if end >= 0 else None].rstrip(b"\r").decode("utf-8", "replace")


class Age(NamedTuple):
    """How many seconds the server with a run id has served the locks; None if it does not report that."""

    run_id: str = ""
    seconds: float | None = None


def parse_age(raw: Any) -> Age:
    """
    Return how long a server has served these locks.

    Raises:
        LinkError: The server is loading its data, or has become a replica.
    """
    if isinstance(raw, exceptions.RedisError):
        failure = parse_error(raw).failure
        if failure is Failure.LOADING:
            raise LinkError(failure)  # it will know soon, but this connection is not asked again
        if failure in (Failure.READONLY, Failure.MASTERDOWN):
            raise LinkError(Failure.REPLICA)
        return Age()
    try:
        word, run_id, micros = raw.decode().split(" ")
        return Age(run_id, whole(micros) / 1e6) if word == "SERVED" else Age()
    except (ValueError, AttributeError):
        return Age()


def aged(greeting: Greeting, age: Age) -> Greeting:
    """
    Return *greeting* with the server's age.

    Raises:
        LinkError: The greeting and the age come from two servers.
    """
    if greeting.run_id and age.run_id not in ("", greeting.run_id):
        raise LinkError(Failure.TWO_SERVERS)
    return replace(greeting, age=age.seconds)


def check_subscription(raw: Any) -> None:
    """
    Check that the reply confirms the subscription to a channel.

    Raises:
        LinkError: The subscription failed; an ACL may forbid it.
    """
    if not isinstance(raw, list):
        raise link_error(raw) if isinstance(raw, exceptions.RedisError) else LinkError(Failure.MALFORMED)


def link_error(error: BaseException) -> LinkError:
    """Return what to report about a failure to connect, send or receive, without anything that the error quotes."""
    if isinstance(error, LinkError):
        return error
    if isinstance(error, (exceptions.TimeoutError, TimeoutError)):
        return LinkError(Failure.TIMEOUT)
    if isinstance(error, exceptions.RedisError) and (failure := failure_of(error)):
        return LinkError(failure)
    # redis-py replaces the error that shows what happened with one of its own.
    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    if known := next(filter(None, map(known_cause, causes)), None):
        return known
    if isinstance(error, exceptions.ResponseError):
        return LinkError(Failure.ERROR_REPLY)
    return LinkError(Failure.CLOSED if "closed" in str(error).lower() else Failure.UNREACHABLE)


def known_cause(error: BaseException) -> LinkError | None:
    """Return what to report about an error of the operating system or of TLS, if it shows what happened."""
    failure = Failure.REFUSED if f"Errno {errno.ECONNREFUSED}" in str(error) else None
    match error:
        case ssl.SSLCertVerificationError():
            return refused_certificate(error)
        case ssl.SSLError():
            # Servers written in Go report a missing certificate as a bad one.
            wanted = any(alert in (error.reason or "") for alert in ("CERTIFICATE_REQUIRED", "BAD_CERTIFICATE"))
            failure = Failure.NO_CLIENT_CERTIFICATE if wanted else Failure.TLS_FAILED
        case socket.gaierror():
            failure = Failure.UNKNOWN_HOST
        case FileNotFoundError():
            failure = Failure.NO_SUCH_FILE
        case ConnectionRefusedError():
            failure = Failure.REFUSED
        case ConnectionError():
            failure = Failure.RESET
        case ValueError() | exceptions.InvalidResponse():
            failure = Failure.MALFORMED
    return failure and LinkError(failure)


def refused_certificate(error: ssl.SSLCertVerificationError) -> LinkError:
    """Return what to report about a server's certificate that this client refuses."""
    if error.verify_code in WRONG_NAME:
        return LinkError(Failure.WRONG_CERTIFICATE)
    if error.verify_code == EXPIRED:
        return LinkError(Failure.CERTIFICATE_EXPIRED)
    return LinkError(Failure.CERTIFICATE_REFUSED, f"{Failure.CERTIFICATE_REFUSED.value}, {error.verify_message}")


class Assembly:
    """Combine the replies to the parts of a request as they arrive."""

    def __init__(self) -> None:
        self._replies: list[Reply | None] = []

    def add(self, request: Request, reply: Reply | None) -> Reply | None:
        """Add a reply, or None if the script is unknown; return the reply to the whole request, or ``INCOMPLETE``."""
        if not many(request):
            # The usual case is handled here, because this runs for every lock.
            if reply is None or (reply.kind is not Kind.ACCEPTED and reply.kind in EXPECTED[type(request)]):
                return reply
            return checked(request, reply)
        self._replies.append(reply and checked(request, reply))
        if len(self._replies) < len(split(request)):
            return INCOMPLETE
        replies, self._replies = self._replies, []
        known = [one for one in replies if one is not None]
        return merge(known) if len(known) == len(replies) else None


def parse_notification(message: Any) -> str:
    """Return the waiter that a message on a channel names, or an empty text for any other message."""
    if not isinstance(message, list) or len(message) < 3 or message[0] != b"message":
        return ""
    return str(message[2], "utf-8", "replace")
