"""What an error of a Redis or Valkey server, or on the way to it, means (internal)."""

import re
from collections.abc import Mapping

from redis import exceptions

from ...core.protocol import Failure, Kind, Reply, failed
from ..base import LinkError, known_cause

# redis-py's exceptions for error replies; it counts the last two as connection errors.
ERROR_REPLIES = (exceptions.ResponseError, exceptions.BusyLoadingError, exceptions.AuthenticationError)

# The errors that end a connection. redis-py raises ValueError for a malformed length or number.
BROKEN = (exceptions.RedisError, OSError, ValueError)


def link_error(error: BaseException) -> LinkError:
    """Return what to report about a failure to connect, send or receive, without anything that the error quotes."""
    if isinstance(error, LinkError):
        return error
    if isinstance(error, (exceptions.TimeoutError, TimeoutError)):
        return LinkError(Failure.TIMEOUT)
    if isinstance(error, exceptions.RedisError) and (failure := failure_of(error)):
        return LinkError(failure, naming_command(failure, str(error)))
    # redis-py replaces the error that shows what happened with one of its own.
    cause: BaseException | None = error
    while cause:
        if isinstance(cause, exceptions.InvalidResponse):
            return LinkError(Failure.MALFORMED)
        if known := known_cause(cause):
            return known
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, exceptions.ResponseError):
        return LinkError(Failure.ERROR_REPLY)
    return LinkError(Failure.CLOSED if "closed" in str(error).lower() else Failure.UNREACHABLE)


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
    return failed(known, detail=naming_command(known, text)) if known else failed(Failure.ERROR_REPLY, Kind.UNKNOWN)


def naming_command(failure: Failure, text: str) -> str:
    """Return what to report about a failure: its words, and the command that was refused if the error names it."""
    found = COMMAND.search(text) if failure in (Failure.NOPERM, Failure.NO_COMMAND) else None
    return f"{failure.value}: {found[1].upper()}" if found else failure.value


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

# The failures that are named after the first word of the error reply.
ERROR_WORDS = {failure.value: failure for failure in Failure if failure.value.isupper()}

# Errors without such a word, or that lose it in every version of redis-py.
ERROR_PHRASES = (
    ("Authentication required", Failure.NOAUTH),
    ("invalid username-password pair", Failure.WRONGPASS),
    ("without any password configured", Failure.NO_PASSWORD),
    ("max number of clients", Failure.MAX_CLIENTS),
    ("DB index is out of range", Failure.NO_SUCH_DATABASE),
    ("cluster support disabled", Failure.WRONG_MODE),
    ("FORGOT", Failure.FORGOT),
    ("unknown command", Failure.NO_COMMAND),
    ("Unknown Redis command", Failure.NO_COMMAND),  # inside a script
)

# The command that an error names: the server does not know it, or the user may not run it.
COMMAND = re.compile(r"(?:unknown command|permissions to run the) ['`]([A-Za-z|]{1,30})['`]")

# How the servers refuse a command inside a script, each version in its own words.
SCRIPT_PHRASES = ("ACL failure in script", "The user executing the script can't")

# Lua's error when a script compares a fencing token that is no number. Scripts compare nothing else that others write.
COMPARED = "attempt to compare"

# The error replies of a server that is no longer a master, or whose memory is no longer the one that the connection
# learned, and what to report for each. A new connection learns what the server is now.
DEMOTED: Mapping[Failure, Failure] = {each: each for each in (Failure.READONLY, Failure.MASTERDOWN, Failure.FORGOT)}
