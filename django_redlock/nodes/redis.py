"""
A Redis or Valkey master as a node.

RESP, TLS and authentication are redis-py's business, but for the replies that an event loop hands over (see
:mod:`.resp`); the connections are ours: explicit short timeouts, no retries, no pool. A silent node costs a client
built with redis-py 8.1's defaults 59 seconds.
"""

import asyncio
import errno
import hashlib
import inspect
import json
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import connection as aioconnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.retry import Retry

from ..core.admission import Greeting
from ..core.messages import (
    ABSENT,
    ENROLMENT,
    SHOWN_WAITERS,
    Acquire,
    Extend,
    Kind,
    Raise,
    Release,
    Reply,
    Request,
    Row,
    Survey,
)
from ..core.parts import many, merge, split
from .base import INCOMPLETE, LinkError, NodeSpec, until_cancelled
from .resp import PARTIAL, Replies

ALIASES = {"valkey": "redis", "valkeys": "rediss"}

# Ours to decide, whatever the URL and redis-py's defaults say.
FIXED: dict[str, Any] = {"protocol": 2, "decode_responses": False, "health_check_interval": 0}
# redis-py would tell the server its name and version, which takes a right of its own. The argument changed in 7.
if "driver_info" in inspect.signature(AbstractConnection.__init__).parameters:
    FIXED |= {"driver_info": None}
else:
    FIXED |= {"lib_name": None, "lib_version": None}

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

# What a socket that does not block raises when it would.
BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
NOTHING = object()  # stands for a reply that has not come
READ_SIZE = 16_384  # bytes that a link of an event loop reads at a time
CROWD = 4  # requests on their way, from which on a link writes once per turn of the loop

# How OpenSSL says that a certificate is good, but not for this host name or address.
WRONG_NAME = (62, 64)

# What redis-py's own lock raises, for django_redlock.compat.
RedisLockError = exceptions.LockError
RedisLockNotOwnedError = exceptions.LockNotOwnedError


class Script:
    """One of the Lua scripts beside this module."""

    def __init__(self, name: str) -> None:
        self.text = files(__package__).joinpath(f"scripts/{name}.lua").read_bytes()
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()


SCRIPTS = {request: Script(request.__name__.lower()) for request in (Acquire, Raise, Extend, Release, Survey)}


Said = TypeVar("Said")


class Introductions:
    """
    Which scripts a connection has sent with their text, so that its server knows them by their digest.

    A script is sent in full the first time rather than loaded: that takes no command, and no right, of its own.
    """

    def __init__(self) -> None:
        self._sent: set[type[Request]] = set()

    def is_new(self, request: Request) -> bool:
        """Return whether the script of *request* has not been sent yet; from now on it has."""
        new = type(request) not in self._sent
        self._sent.add(type(request))
        return new


def ms(seconds: float | None) -> str:
    """Return *seconds* as whole milliseconds, the empty string for None."""
    return "" if seconds is None else str(max(1, round(seconds * 1000)))


def flag(value: bool) -> str:
    """Return a truth value as the scripts read it."""
    return "1" if value else ""


class Wording:
    """
    Say requests in the words of the scripts: keys and arguments.

    Args:
        prefix: What every key of the alias begins with.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def channel(self, process: str) -> str:
        """Return the channel on which the waiters of a process are told that they are first in line."""
        return f"{self._prefix}w:{process}"

    def command(self, request: Request, *, in_full: bool) -> list[str | bytes]:
        """Return the command that runs the request's script, by its digest or with its text."""
        script = SCRIPTS[type(request)]
        keys, arguments = self._say(request)
        run = ("EVAL", script.text) if in_full else ("EVALSHA", script.sha)
        return [*run, str(len(keys)), *keys, *arguments]

    def _say(self, request: Request) -> tuple[list[str], list[str]]:
        """Return the keys that a request touches and what else its script needs, both in the script's order."""
        match request:
            case Acquire():
                return self._acquire(request)
            case Raise(slugs, nonce, number, keep, shared):
                return self._keys(slugs, "hf", shared), [nonce, str(number), ms(keep), flag(shared)]
            case Extend():
                return self._extend(request)
            case Release(slugs, nonce, bury, leaving, shared, queue, revoke):
                keys = [self._index, self._marker(nonce), *self._keys(slugs, "hqs", shared, queue)]
                return keys, [nonce, ms(bury) if bury else "0", self._prefix, leaving, flag(shared), flag(revoke)]
            case Survey(slugs, offset, size, waiters):
                shown = SHOWN_WAITERS if waiters else 0
                return [self._index], [self._prefix, str(offset), str(size), str(shown), *slugs]

    def _acquire(self, request: Acquire) -> tuple[list[str], list[str]]:
        keys = self._keys(request.slugs, "hfqs", request.shared, request.queue)
        timing = [ms(request.ttl), str(request.number), ms(request.keep), str(round(request.ahead * 1_000_000))]
        waiting = [request.waiter, str(request.stamp), ms(ENROLMENT)]
        flags = [flag(request.barge), flag(request.shared), flag(request.passing)]
        return [self._index, self._marker(request.nonce), *keys], [
            *(request.nonce, request.value, *timing, request.adopt, self._prefix),
            *(*waiting, *flags),
        ]

    def _extend(self, request: Extend) -> tuple[list[str], list[str]]:
        keys, arguments = [self._index], [self._prefix, ms(request.keep)]
        for slugs, nonce, value, ttl, token, shared, shorten, _ in request.terms:
            keys += [self._marker(nonce), *self._keys(slugs, "hf", shared)]
            arguments += [str(len(slugs)), flag(shared), flag(shorten), nonce, ms(ttl), str(token), value]
        return keys, arguments

    @property
    def _index(self) -> str:
        return f"{self._prefix}index"

    def _marker(self, nonce: str) -> str:
        return f"{self._prefix}x:{nonce}"

    def _keys(self, slugs: tuple[str, ...], kinds: str, shared: bool, queue: str = "") -> list[str]:
        """Return the keys of each name, one per kind; behind them, if shared, the key of each name's holders."""
        owners = {"q": queue, "s": queue}
        keys = [f"{self._prefix}{owners.get(kind) or slug}:{kind}" for slug in slugs for kind in kinds]
        return keys + [f"{self._prefix}{slug}:r" for slug in slugs] if shared else keys


def parse_answer(raw: Any, demoted: str) -> Reply | None:
    """
    Return the meaning of what a node answered to a request; None if it does not know the script.

    Raises:
        LinkError: It is no master any more; a new connection tells when it is one again. *demoted* is what to say.
    """
    if isinstance(raw, exceptions.NoScriptError):
        return None
    if not isinstance(raw, exceptions.RedisError):
        return parse_reply(raw)
    reply = parse_error(raw)
    if reply.detail in ("READONLY", "MASTERDOWN"):
        raise LinkError(demoted or reply.detail)
    return reply


def parse_reply(raw: Any) -> Reply:
    """Return the meaning of a script's reply; anything but a well-formed one is no vote."""
    try:
        if isinstance(raw, list):
            return parse_survey([part.decode("utf-8", "replace") for part in raw])
        kind, fence, time, left, place, detail = raw.decode("utf-8", "replace").split(" ", 5)
        if kind in EXTENSIONS:
            return Reply(Kind[kind], int(fence), int(time), terms=tuple(map(parse_term, detail.split())))
        return Reply(Kind[kind], int(fence), int(time), seconds_left(left), detail, int(place))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Reply(Kind.UNKNOWN, detail="malformed reply")


MAX_DIGITS = 19  # of a fencing token
EXTENSIONS = frozenset({"HELD", "MIXED", "REFUSED"})


def parse_term(said: str) -> tuple[Kind, int]:
    """Return what became of one lease of an extension, and its fence."""
    return {"H": Kind.HELD, "R": Kind.REFUSED, "S": Kind.REVOKED}[said[0]], int(said[1:])


def parse_survey(parts: list[str]) -> Reply:
    """Return the locks that a survey reports."""
    kind, fence, time, total, said = parts
    cells = json.loads(said, strict=False)
    rows = zip(cells[::5], cells[1::5], cells[2::5], cells[3::5], cells[4::5], strict=True)
    parsed = tuple(
        [
            Row(slug, value, seconds_left(pttl), token(number), tuple(waiters.split(" ")) if waiters else ())
            for slug, value, pttl, number, waiters in rows
        ]
    )
    return Reply(Kind[kind], int(fence), int(time), rows=parsed, total=int(total))


def token(text: str) -> int:
    """Return the fencing token in a key; 0 for what is none, which another program wrote."""
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else 0


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


def read(connection: AbstractConnection) -> Any:
    """
    Read one reply; an error reply is returned, not raised.

    Raises:
        LinkError: There is none, or it is not one, or it is an error after which redis-py hangs up.
    """
    try:
        return connection.read_response(disable_decoding=True)
    except exceptions.ResponseError as error:
        return error
    except BROKEN as error:
        raise LinkError(describe(error)) from None


async def aread(connection: aioconnection.AbstractConnection) -> Any:
    """Do what :func:`read` does without blocking."""
    try:
        return await connection.read_response(disable_decoding=True)
    except exceptions.ResponseError as error:
        return error
    except BROKEN as error:
        raise LinkError(describe(error)) from None


def parse_greeting(raw: Any) -> Greeting:
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
        uptime=float(info["uptime_in_seconds"]) if "uptime_in_seconds" in info else None,
        evicts=evicts,
        promoted=info.get("master_replid", "?") if info.get("second_repl_offset", "-1") != "-1" else "",
    )


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


def verification(
    ssl_cert_reqs: ssl.VerifyMode | str | None = "required", ssl_check_hostname: bool | None = None, **others: Any
) -> dict[str, Any]:
    """Return how certificates are verified, with the host name unless told otherwise, for every version of redis-py."""
    # Before version 6, redis-py took a good certificate of any host; some versions know the words only.
    how = "none" if ssl_cert_reqs is None else ssl_cert_reqs
    how = how.name.removeprefix("CERT_").lower() if isinstance(how, ssl.VerifyMode) else how
    check = ssl_check_hostname is not False and how != "none"
    return {"ssl_cert_reqs": how, "ssl_check_hostname": check}


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


class RedisNode:
    """
    One Redis or Valkey master.

    Args:
        spec: Its URL and options.
        prefix: What every key begins with.

    Raises:
        ValueError: redis-py cannot make a connection of the URL and options.
    """

    instant = False
    calls = True
    fails_over = False

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        scheme, rest = spec.url.split(":", 1)
        try:
            arguments: dict[str, Any] = dict(parse_url(f"{ALIASES.get(scheme, scheme)}:{rest}"))
        except ValueError:
            # The message of urllib or redis-py may quote the URL, and with it the password.
            raise ValueError("its address, port or database number cannot be read") from None
        self._class: type[AbstractConnection] = arguments.pop("connection_class", Connection)
        self._arguments = arguments | dict(spec.options)
        if issubclass(self._class, SSLConnection):
            self._arguments |= verification(**self._arguments)
        self._wording = Wording(prefix)
        self.address = self._address()
        self.name = spec.name or self.address
        self._new_connection(1.0)

    def __repr__(self) -> str:
        return f"<RedisNode {self.name}>"

    @property
    def encrypted(self) -> bool:
        """Whether its connections are encrypted."""
        return issubclass(self._class, SSLConnection)

    @property
    def authenticated(self) -> bool:
        """Whether a password is sent."""
        return bool(self._arguments.get("password") or self._arguments.get("credential_provider"))

    @property
    def remote(self) -> bool:
        """Whether its connections leave this machine."""
        host = str(self._arguments.get("host", "localhost"))
        local = host in ("localhost", "::1") or host.startswith("127.")
        return self._class is not UnixDomainSocketConnection and not local

    def _address(self) -> str:
        if self._class is UnixDomainSocketConnection:
            return str(self._arguments.get("path", ""))
        host = self._arguments.get("host", "localhost")
        return f"{f'[{host}]' if ':' in host else host}:{self._arguments.get('port', 6379)}"

    def _new_connection(self, timeout: float, **where: Any) -> AbstractConnection:
        timeouts = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        fixed: dict[str, Any] = FIXED | timeouts | {"retry": Retry(NoBackoff(), 0)}
        if self._class is not UnixDomainSocketConnection:
            fixed["socket_keepalive"] = True
        try:
            return self._class(**(self._arguments | fixed | where))
        except TypeError as error:
            unknown = str(error).rpartition("argument ")[2]
            raise ValueError(f"redis-py's connection has no option {unknown}") from None
        except exceptions.RedisError as error:
            raise ValueError(f"redis-py refuses its options ({type(error).__name__})") from None

    def connect(self, timeout: float) -> "RedisLink":
        """Open a link; see :class:`~django_redlock.nodes.base.Node`."""
        return self._connect(self._new_connection(timeout))

    def listen(self, process: str, timeout: float, on_hint: Callable[[str], object]) -> "RedisHintLink":
        """Open a link for hints; see :class:`~django_redlock.nodes.base.Node`."""
        connection = self._new_connection(timeout)
        self._open(connection, ("SUBSCRIBE", self._wording.channel(process)), check_subscription)
        return RedisHintLink(connection)

    def _connect(self, connection: AbstractConnection) -> "RedisLink":
        return RedisLink(connection, self._wording, self._open(connection, ("INFO",), parse_greeting))

    def _open(
        self, connection: AbstractConnection, command: tuple[str, ...], understand: Callable[[Any], Said]
    ) -> Said:
        """Connect and send the first command; returns what *understand* makes of the reply."""
        try:
            connection.connect()
            connection.send_command(*command, check_health=False)
            return understand(read(connection))
        except (LinkError, *BROKEN) as error:
            connection.disconnect()
            raise LinkError(describe(error)) from None

    async def aconnect(self, timeout: float) -> "AsyncRedisLink":
        """Open a link for the running event loop; see :class:`~django_redlock.nodes.base.Node`."""
        return await self._aconnect(self._new_async_connection(timeout), timeout)

    async def alisten(self, process: str, timeout: float, on_hint: Callable[[str], object]) -> "AsyncRedisHintLink":
        """Open a link for hints; see :class:`~django_redlock.nodes.base.Node`."""
        connection = self._new_async_connection(timeout)
        await self._aopen(connection, timeout, ("SUBSCRIBE", self._wording.channel(process)), check_subscription)
        return AsyncRedisHintLink(connection)

    def _new_async_connection(self, timeout: float, **where: Any) -> aioconnection.AbstractConnection:
        classes = {
            Connection: aioconnection.Connection,
            SSLConnection: aioconnection.SSLConnection,
            UnixDomainSocketConnection: aioconnection.UnixDomainSocketConnection,
        }
        # No read timeout: one task reads for as long as the link lives, and rounds have timeouts of their own.
        timeouts = {"socket_timeout": None, "socket_connect_timeout": timeout}
        fixed: dict[str, Any] = FIXED | timeouts | {"retry": AsyncRetry(NoBackoff(), 0)}
        connection: aioconnection.AbstractConnection = classes[self._class](**(self._arguments | fixed | where))
        return connection

    async def _aconnect(self, connection: aioconnection.AbstractConnection, timeout: float) -> "AsyncRedisLink":
        greeting = await self._aopen(connection, timeout, ("INFO",), parse_greeting)
        try:
            return AsyncRedisLink(connection, self._wording, greeting)
        except LinkError:
            drop(connection)
            raise

    async def _aopen(
        self,
        connection: aioconnection.AbstractConnection,
        timeout: float,
        command: tuple[str, ...],
        understand: Callable[[Any], Said],
    ) -> Said:
        """Do what :meth:`_open` does without blocking."""
        try:
            async with asyncio.timeout(timeout):
                await connection.connect()
                await connection.send_command(*command, check_health=False)
                return understand(await aread(connection))
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if isinstance(error, (LinkError, *BROKEN)):
                raise LinkError(describe(error)) from None
            raise  # cancelled


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


class RedisLink:
    """
    One connection of redis-py's, used without its client: what is sent is sent once.

    Its socket does not block. With a timeout, Python would poll before it sends and before it receives, although the
    round that asks has polled already.
    """

    demoted = ""
    """What to say when the server is no master any more; empty is what it says itself."""

    def __init__(self, connection: AbstractConnection, wording: Wording, greeting: Greeting) -> None:
        self.greeting = greeting
        self._connection = connection
        self._wording = wording
        self._scripts = Introductions()
        self._assembly = Assembly()
        self._ahead: Any = NOTHING
        self._sock: socket.socket | None = connection._sock
        if self._sock is not None:
            self._sock.setblocking(False)

    def fileno(self) -> int:
        return fileno(self._connection)

    def send(self, request: Request, packed: dict[int, bytes], *, in_full: bool = False) -> None:
        in_full = in_full or self._scripts.is_new(request)
        data = pack(self._wording, request, packed, in_full)
        if self._sock is None:
            raise LinkError("closed")
        try:
            sent = self._sock.send(data)
        except BLOCKED:
            sent = 0
        except OSError as error:
            raise LinkError(describe(error)) from None
        if sent < len(data):
            self._send_rest(self._sock, memoryview(data)[sent:])

    def _send_rest(self, sock: socket.socket, rest: memoryview) -> None:
        """Send what was too much for the socket's buffer; blocks for at most the time allowed for connecting."""
        try:
            sock.settimeout(self._connection.socket_timeout)
            sock.sendall(rest)
            sock.setblocking(False)
        except OSError as error:
            raise LinkError(describe(error)) from None

    def receive(self, request: Request) -> Reply | None:
        raw, self._ahead = self._ahead, NOTHING
        if isinstance(raw, LinkError):
            raise raw
        return self._assembly.add(request, parse_answer(raw, self.demoted))

    def readable(self) -> bool:
        """Read one reply ahead, if all of it is there: bytes that TLS or redis-py hold back, no poll shows."""
        if self._ahead is NOTHING:
            self._ahead = self._read()
        return self._ahead is not NOTHING

    def _read(self) -> Any:
        """Return a reply, the error that ended the connection, or ``NOTHING``."""
        if self._sock is None:
            return LinkError("reset")
        try:
            return self._connection.read_response(disable_decoding=True, disconnect_on_error=False)
        except exceptions.ResponseError as error:
            return error
        except BROKEN as error:  # redis-py makes an error of its own of one of the socket
            return NOTHING if isinstance(error.__context__, BLOCKED) else LinkError(describe(error))

    def close(self) -> None:
        self._sock = None
        self._connection.disconnect()


class RedisHintLink:
    """A connection that has subscribed to the channel of a process."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection

    def fileno(self) -> int:
        return fileno(self._connection)

    def read(self) -> list[str]:
        told = []
        try:
            while readable(self._connection):
                fileno(self._connection)  # redis-py drops the socket when it is reset, and then fails to read
                told.append(hinted(self._connection.read_response(disable_decoding=True)))
        except BROKEN as error:
            raise LinkError(describe(error)) from None
        return told

    def close(self) -> None:
        self._connection.disconnect()


class AsyncRedisHintLink:
    """The same for an event loop."""

    def __init__(self, connection: aioconnection.AbstractConnection) -> None:
        self._connection = connection

    async def read(self) -> list[str]:
        try:
            return [hinted(await self._connection.read_response(disable_decoding=True))]
        except BROKEN as error:
            raise LinkError(describe(error)) from None

    def close(self) -> None:
        drop(self._connection)


def hinted(message: Any) -> str:
    """Return the waiter that a message of a channel names."""
    return message[2].decode("utf-8", "replace") if message[0] == b"message" else ""


def fileno(connection: AbstractConnection) -> int:
    """Return the file descriptor of a connection."""
    sock = connection._sock
    if sock is None:
        raise LinkError("closed")
    return int(sock.fileno())


def readable(connection: AbstractConnection) -> bool:
    """Return whether there is something to read, or the connection ended."""
    if connection._sock is None:
        return True
    try:
        return bool(connection.can_read(timeout=0))
    except (exceptions.RedisError, OSError):
        return True


def drop(connection: aioconnection.AbstractConnection) -> None:
    """Close a connection of an event loop as its ``disconnect()`` does, which has to be awaited."""
    writer = connection._writer
    connection._reader = connection._writer = None  # redis-py warns of a connection that still has them
    if writer is not None:
        with suppress(RuntimeError):  # the loop is closed already, and its transports with it
            writer.transport.abort()


def pack(wording: Wording, request: Request, packed: dict[int, bytes], in_full: bool) -> bytes:
    """Return the bytes of a request, made once for all nodes of a round."""
    key = -id(request) if in_full else id(request)
    if key not in packed:
        packed[key] = b"".join([resp(wording.command(part, in_full=in_full)) for part in split(request)])
    return packed[key]


def resp(words: Sequence[str | bytes]) -> bytes:
    """Return the bytes of a command; redis-py, which has more kinds of words to mind, takes three times as long."""
    parts = [word if isinstance(word, bytes) else word.encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


class AsyncRedisLink(asyncio.BufferedProtocol):
    """
    One connection for all tasks of an event loop.

    redis-py makes it; then the transport is taken over, because its streams cost more than the rest of a round
    (see :mod:`.resp`). Writing is ours as well: redis-py's ``send_packed_command`` waits, and a request must be
    either sent or not. The link has a task that does nothing, so that whoever cancels all tasks of a loop, as
    :func:`asyncio.run` does at its end, closes it too.

    Raises:
        LinkError: The connection has ended meanwhile.
    """

    demoted = ""

    def __init__(self, connection: aioconnection.AbstractConnection, wording: Wording, greeting: Greeting) -> None:
        loop = asyncio.get_running_loop()
        self.greeting = greeting
        self.broken = False
        self._connection = connection
        self._wording = wording
        self._scripts = Introductions()
        self._waiting: deque[tuple[Request, Callable[[Reply | None], bool]]] = deque()
        self._assembly = Assembly()
        self._replies = Replies(connection._parser.parse_error)
        self._room = memoryview(bytearray(READ_SIZE))
        self._unsent: list[bytes] = []
        self._loop = loop
        self._writer = take_over(connection, self)  # kept, because a stream writer closes when it is collected
        self._transport = self._writer.transport
        self._keeper = loop.create_task(until_cancelled(), name="django_redlock link")
        self._keeper.add_done_callback(lambda keeper: self.close())

    def send(
        self,
        request: Request,
        packed: dict[int, bytes],
        on_reply: Callable[[Reply | None], bool],
        *,
        in_full: bool = False,
    ) -> None:
        if self.broken or self._transport.is_closing():
            raise LinkError("closed")
        in_full = in_full or self._scripts.is_new(request)
        self._write(pack(self._wording, request, packed, in_full))
        self._waiting.append((request, on_reply))

    def _write(self, data: bytes) -> None:
        """Send at once; of a crowd of tasks, send together what they have to say in one turn of the loop."""
        if self._unsent:
            self._unsent.append(data)
        elif len(self._waiting) < CROWD:
            self._transport.write(data)
        else:
            self._unsent.append(data)
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        replies = self._replies
        replies.feed(bytes(self._room[:nbytes]))
        try:
            while not self.broken and (raw := replies.next()) is not PARTIAL:
                self._take(raw)
        except LinkError as error:
            self._end(error.detail)
        except (ValueError, IndexError):  # no reply, or one that nobody asked for
            self._end("malformed reply")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(describe(exc) if exc else "closed")

    def _take(self, raw: Any) -> None:
        request, on_reply = self._waiting[0]
        if isinstance(raw, exceptions.RedisError) and not isinstance(raw, exceptions.ResponseError):
            raise LinkError(describe(raw))  # redis-py hangs up after these
        whole = self._assembly.add(request, parse_answer(raw, self.demoted))
        if whole is INCOMPLETE:
            return
        self._waiting.popleft()
        if whole is None:
            self._again(request, on_reply)
        else:
            on_reply(whole)

    def _again(self, request: Request, on_reply: Callable[[Reply | None], bool]) -> None:
        """Send a request whose script the server does not know once more, in full, if it is still wanted."""
        if on_reply(None):
            with suppress(LinkError):
                self.send(request, {}, on_reply, in_full=True)
                return
        on_reply(Reply(Kind.FAILED, detail="NOSCRIPT"))

    def close(self) -> None:
        self._end("closed")

    def _end(self, detail: str) -> None:
        """Drop the connection, and tell all who wait for a reply that there will be none."""
        if self.broken:
            return
        self._flush()  # what is written before a link is dropped, such as a release, is sent
        self.broken = True
        with suppress(RuntimeError):  # the loop is closed already, and its transports and tasks with it
            self._transport.abort()
            self._keeper.cancel()
        while self._waiting:
            self._waiting.popleft()[1](Reply(Kind.UNKNOWN, detail=detail))


def take_over(connection: aioconnection.AbstractConnection, protocol: asyncio.BaseProtocol) -> asyncio.StreamWriter:
    """
    Have *protocol* read what comes on a connection from now on, instead of redis-py.

    Raises:
        LinkError: The connection has ended, and *protocol* would never hear of it.
    """
    reader, writer = connection._reader, connection._writer
    if reader is None or writer is None or reader.at_eof() or writer.is_closing():
        raise LinkError("closed")
    writer.transport.set_protocol(protocol)
    connection._reader = connection._writer = None  # redis-py closes, and warns of, what it still has
    return writer


def open_node(spec: NodeSpec, prefix: str) -> RedisNode:
    """Return the node of a ``redis``, ``rediss``, ``unix``, ``valkey`` or ``valkeys`` URL."""
    if urlsplit(spec.url).scheme == "unix" and not urlsplit(spec.url).path:
        raise ValueError("a unix:// URL needs the path of a socket, such as unix:///run/valkey.sock")
    return RedisNode(spec, prefix)
