"""
A Redis or Valkey master as a node.

RESP, TLS and authentication are redis-py's business; the connections are ours: explicit short timeouts, no
retries, no pool. A silent node costs a client built with redis-py 8.1's defaults 59 seconds.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import connection as aioconnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.retry import Retry

from ..core.admission import Greeting
from ..core.messages import ABSENT, ENROLMENT, Acquire, Extend, Kind, Raise, Release, Reply, Request, Row, Survey
from ..core.parts import many, merge, split
from .base import INCOMPLETE, LinkError, NodeSpec

ALIASES = {"valkey": "redis", "valkeys": "rediss"}

# Ours to decide, whatever the URL and redis-py's defaults say.
FIXED: dict[str, Any] = {"protocol": 2, "decode_responses": False, "health_check_interval": 0}

# redis-py drops the first word of an error that has a class of its own.
ERROR_CLASSES: tuple[tuple[type[Exception], str], ...] = (
    (exceptions.BusyLoadingError, "LOADING"),
    (exceptions.ReadOnlyError, "READONLY"),
    (exceptions.NoPermissionError, "NOPERM"),
    (exceptions.AuthenticationError, "NOAUTH"),
    (exceptions.OutOfMemoryError, "OOM"),
)
ERROR_WORDS = (
    "WRONGTYPE", "MISCONF", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "CROSSSLOT", "TRYAGAIN", "MOVED", "ASK", "BUSY"
)  # fmt: skip


# redis-py raises some error replies as connection errors.
ERROR_REPLIES = (exceptions.ResponseError, exceptions.BusyLoadingError, exceptions.AuthenticationError)

# What redis-py's own lock raises, for django_redlock.compat.
RedisLockError = exceptions.LockError
RedisLockNotOwnedError = exceptions.LockNotOwnedError


class Script:
    """One of the Lua scripts beside this module."""

    def __init__(self, name: str) -> None:
        self.text = files(__package__).joinpath(f"scripts/{name}.lua").read_bytes()
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()


SCRIPTS = {request: Script(request.__name__.lower()) for request in (Acquire, Raise, Extend, Release, Survey)}

# Sent with every new connection: who are you, and learn our scripts, so that a request seldom has to be repeated in
# full. An ACL may forbid either.
HELLO = [("INFO",), *(("SCRIPT", "LOAD", script.text) for script in SCRIPTS.values())]


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

    def command(self, request: Request, *, in_full: bool) -> list[Any]:
        """Return the command that runs the request's script, by its digest or with its text."""
        script = SCRIPTS[type(request)]
        keys, arguments = self._say(request)
        run: list[Any] = ["EVAL", script.text] if in_full else ["EVALSHA", script.sha]
        return [*run, len(keys), *keys, *arguments]

    def _say(self, request: Request) -> tuple[list[str], list[str]]:
        """Return the keys that a request touches and what else its script needs, both in the script's order."""
        match request:
            case Acquire():
                return self._acquire(request)
            case Raise(slugs, nonce, number, keep, shared):
                return self._keys(slugs, "hf", shared), [nonce, str(number), ms(keep), flag(shared)]
            case Extend():
                return self._extend(request)
            case Release(slugs, nonce, bury, leaving, shared, queue):
                keys = [self._index, self._marker(nonce), *self._keys(slugs, "hqs", shared, queue)]
                return keys, [nonce, ms(bury) if bury else "0", self._prefix, leaving, flag(shared)]
            case Survey(slugs, offset, size):
                return [self._index], [self._prefix, str(offset), str(size), *slugs]

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
        for slugs, nonce, value, ttl, token, shared, shorten in request.terms:
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


EXTENSIONS = frozenset({"HELD", "MIXED", "REFUSED"})


def parse_term(said: str) -> tuple[Kind, int]:
    """Return what became of one lease of an extension, and its fence."""
    return {"H": Kind.HELD, "R": Kind.REFUSED}[said[0]], int(said[1:])


def parse_survey(parts: list[str]) -> Reply:
    """Return the locks that a survey reports."""
    kind, fence, time, total, _, *cells = parts
    rows = zip(cells[::4], cells[1::4], cells[2::4], cells[3::4], strict=True)
    parsed = tuple(Row(slug, value, seconds_left(pttl), int(number)) for slug, value, pttl, number in rows)
    return Reply(Kind[kind], int(fence), int(time), rows=parsed, total=int(total))


def seconds_left(pttl: str) -> float | None:
    """Return a PTTL in seconds: None for a key without expiry, ``ABSENT`` for no key."""
    value = int(pttl)
    return None if value == -1 else ABSENT if value == -2 else value / 1000


def parse_error(error: exceptions.RedisError) -> Reply:
    """
    Return what an error reply means: no vote, and which error.

    The scripts read every key before they write, so these errors come before anything was written. Only a known
    word of the error is kept; the rest may name keys and users.
    """
    for kind, word in ERROR_CLASSES:
        if isinstance(error, kind):
            return Reply(Kind.FAILED, detail=word)
    # Redis 6.2 puts the error of a command inside a script behind "ERR Error running script ...".
    words = str(error).replace(":", " ").split()
    known = next((word for word in words if word in ERROR_WORDS), "")
    return Reply(Kind.FAILED, detail=known) if known else Reply(Kind.UNKNOWN, detail="error reply")


def read(connection: AbstractConnection) -> Any:
    """Read one reply; an error reply is returned, not raised."""
    try:
        return connection.read_response(disable_decoding=True)
    except ERROR_REPLIES as error:
        return error


async def aread(connection: aioconnection.AbstractConnection) -> Any:
    """Do what :func:`read` does without blocking."""
    try:
        return await connection.read_response(disable_decoding=True)
    except ERROR_REPLIES as error:
        return error


def parse_greeting(replies: list[Any]) -> Greeting:
    """Return what a node's INFO says that matters to a vote; nothing if it was refused."""
    if not isinstance(replies[0], bytes):
        return Greeting()
    lines = replies[0].decode("utf-8", "replace").splitlines()
    info = dict(line.split(":", 1) for line in lines if ":" in line)
    evicts = info.get("maxmemory", "0") != "0" and info.get("maxmemory_policy", "noeviction") != "noeviction"
    return Greeting(
        run_id=info.get("run_id", ""),
        uptime=float(info["uptime_in_seconds"]) if "uptime_in_seconds" in info else None,
        role="replica" if info.get("role") == "slave" else info.get("role", "master"),
        mode=info.get("redis_mode", info.get("server_mode", "standalone")),
        evicts=evicts,
    )


def describe(error: Exception) -> str:
    """Return one or two words for a failure to connect, send or receive."""
    if isinstance(error, (exceptions.TimeoutError, TimeoutError)):
        return "timeout"
    if isinstance(error, ERROR_REPLIES):
        return parse_error(error).detail
    return next((word for word in ("refused", "reset") if word in str(error)), "unreachable")


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

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        scheme, rest = spec.url.split(":", 1)
        try:
            arguments: dict[str, Any] = dict(parse_url(f"{ALIASES.get(scheme, scheme)}:{rest}"))
        except ValueError:
            # The message of urllib or redis-py may quote the URL, and with it the password.
            raise ValueError("its address, port or database number cannot be read") from None
        self._class: type[AbstractConnection] = arguments.pop("connection_class", Connection)
        self._arguments = arguments | dict(spec.options)
        self._wording = Wording(prefix)
        self.address = self._address()
        self.name = spec.name or self.address
        self._new_connection(1.0)

    def __repr__(self) -> str:
        return f"<RedisNode {self.name}>"

    def _address(self) -> str:
        if self._class is UnixDomainSocketConnection:
            return str(self._arguments.get("path", ""))
        return f"{self._arguments.get('host', 'localhost')}:{self._arguments.get('port', 6379)}"

    def _new_connection(self, timeout: float) -> AbstractConnection:
        timeouts = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        fixed: dict[str, Any] = FIXED | timeouts | {"retry": Retry(NoBackoff(), 0)}
        if self._class is not UnixDomainSocketConnection:
            fixed["socket_keepalive"] = True
        try:
            return self._class(**(self._arguments | fixed))
        except TypeError as error:
            unknown = str(error).rpartition("argument ")[2]
            raise ValueError(f"redis-py's connection has no option {unknown}") from None
        except exceptions.RedisError as error:
            raise ValueError(f"redis-py refuses its options ({type(error).__name__})") from None

    def connect(self, timeout: float) -> "RedisLink":
        """Open a link; see :class:`~django_redlock.nodes.base.Node`."""
        connection, replies = self._open(timeout, HELLO)
        return RedisLink(connection, self._wording, parse_greeting(replies))

    def listen(self, process: str, timeout: float, on_hint: Callable[[str], object]) -> "RedisHintLink":
        """Open a link for hints; see :class:`~django_redlock.nodes.base.Node`."""
        connection, replies = self._open(timeout, [("SUBSCRIBE", self._wording.channel(process))])
        return RedisHintLink(connection, replies)

    def _open(self, timeout: float, commands: list[Any]) -> tuple[AbstractConnection, list[Any]]:
        """Connect and send the first commands; returns the connection and their replies."""
        connection = self._new_connection(timeout)
        try:
            connection.connect()
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            return connection, [read(connection) for _ in commands]
        except (exceptions.RedisError, OSError) as error:
            connection.disconnect()
            raise LinkError(describe(error)) from None

    async def aconnect(self, timeout: float) -> "AsyncRedisLink":
        """Open a link for the running event loop; see :class:`~django_redlock.nodes.base.Node`."""
        connection, replies = await self._aopen(timeout, HELLO)
        return AsyncRedisLink(connection, self._wording, parse_greeting(replies))

    async def alisten(self, process: str, timeout: float, on_hint: Callable[[str], object]) -> "AsyncRedisHintLink":
        """Open a link for hints; see :class:`~django_redlock.nodes.base.Node`."""
        connection, replies = await self._aopen(timeout, [("SUBSCRIBE", self._wording.channel(process))])
        return AsyncRedisHintLink(connection, replies)

    async def _aopen(self, timeout: float, commands: list[Any]) -> tuple[aioconnection.AbstractConnection, list[Any]]:
        """Do what :meth:`_open` does without blocking."""
        classes = {
            Connection: aioconnection.Connection,
            SSLConnection: aioconnection.SSLConnection,
            UnixDomainSocketConnection: aioconnection.UnixDomainSocketConnection,
        }
        # No read timeout: one task reads for as long as the link lives, and rounds have timeouts of their own.
        timeouts = {"socket_timeout": None, "socket_connect_timeout": timeout}
        fixed: dict[str, Any] = FIXED | timeouts | {"retry": AsyncRetry(NoBackoff(), 0)}
        connection = classes[self._class](**(self._arguments | fixed))
        try:
            async with asyncio.timeout(timeout):
                await connection.connect()
                await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
                return connection, [await aread(connection) for _ in commands]
        except (exceptions.RedisError, OSError) as error:
            await connection.disconnect(nowait=True)
            raise LinkError(describe(error)) from None


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
    """One connection of redis-py's, used without its client: what is sent is sent once."""

    def __init__(self, connection: AbstractConnection, wording: Wording, greeting: Greeting) -> None:
        self.greeting = greeting
        self._connection = connection
        self._wording = wording
        self._assembly = Assembly()

    def fileno(self) -> int:
        return fileno(self._connection)

    def send(self, request: Request, packed: dict[int, bytes], *, in_full: bool = False) -> None:
        data = pack(self._connection, self._wording, request, packed, in_full)
        if self._connection._sock is None:  # send_packed_command would connect again
            raise LinkError("closed")
        try:
            self._connection.send_packed_command([data], check_health=False)
        except (exceptions.RedisError, OSError) as error:
            raise LinkError(describe(error)) from None

    def receive(self, request: Request) -> Reply | None:
        if self._connection._sock is None:  # looking whether it is readable may have closed it
            raise LinkError("reset")
        try:
            reply: Reply | None = parse_reply(self._connection.read_response(disable_decoding=True))
        except exceptions.NoScriptError:
            reply = None
        except ERROR_REPLIES as error:
            reply = parse_error(error)
        except (exceptions.RedisError, OSError) as error:
            raise LinkError(describe(error)) from None
        return self._assembly.add(request, reply)

    def readable(self) -> bool:
        return readable(self._connection)

    def close(self) -> None:
        self._connection.disconnect()


class RedisHintLink:
    """A connection that has subscribed to the channel of a process."""

    def __init__(self, connection: AbstractConnection, replies: list[Any]) -> None:
        self._connection = connection
        if not isinstance(replies[0], list):  # an ACL may forbid it
            connection.disconnect()
            raise LinkError(describe(replies[0]))

    def fileno(self) -> int:
        return fileno(self._connection)

    def read(self) -> list[str]:
        told = []
        try:
            while readable(self._connection):
                told.append(hinted(self._connection.read_response(disable_decoding=True)))
        except (exceptions.RedisError, OSError) as error:
            raise LinkError(describe(error)) from None
        return told

    def close(self) -> None:
        self._connection.disconnect()


class AsyncRedisHintLink:
    """The same for an event loop."""

    def __init__(self, connection: aioconnection.AbstractConnection, replies: list[Any]) -> None:
        self._connection = connection
        if not isinstance(replies[0], list):
            drop(connection)
            raise LinkError(describe(replies[0]))

    async def read(self) -> list[str]:
        try:
            return [hinted(await self._connection.read_response(disable_decoding=True))]
        except (exceptions.RedisError, OSError) as error:
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


def pack(
    connection: AbstractConnection | aioconnection.AbstractConnection,
    wording: Wording,
    request: Request,
    packed: dict[int, bytes],
    in_full: bool,
) -> bytes:
    """Return the bytes of a request, made once for all nodes of a round."""
    key = -id(request) if in_full else id(request)
    if key not in packed:
        commands = [wording.command(part, in_full=in_full) for part in split(request)]
        packed[key] = b"".join(chunk for command in commands for chunk in connection.pack_command(*command))
    return packed[key]


class AsyncRedisLink:
    """
    One connection for all tasks of an event loop; a task of its own reads the replies in order.

    The reader task ends with the connection or the loop. redis-py's stream reader and writer are used directly,
    because its own ``send_packed_command`` waits, and a request must be either sent or not.
    """

    def __init__(self, connection: aioconnection.AbstractConnection, wording: Wording, greeting: Greeting) -> None:
        self.greeting = greeting
        self._connection = connection
        self._wording = wording
        self._waiting: deque[tuple[Request, Callable[[Reply | None], bool]]] = deque()
        self._assembly = Assembly()
        self._reader = asyncio.get_running_loop().create_task(self._read(), name="django_redlock reader")
        self.broken = False

    def send(
        self,
        request: Request,
        packed: dict[int, bytes],
        on_reply: Callable[[Reply | None], bool],
        *,
        in_full: bool = False,
    ) -> None:
        writer = self._connection._writer
        if self.broken or writer is None or writer.is_closing():
            raise LinkError("closed")
        writer.write(pack(self._connection, self._wording, request, packed, in_full))
        self._waiting.append((request, on_reply))

    async def _read(self) -> None:
        detail = "closed"
        try:
            while True:
                try:
                    reply: Reply | None = parse_reply(await self._connection.read_response(disable_decoding=True))
                except exceptions.NoScriptError:
                    reply = None
                except ERROR_REPLIES as error:
                    reply = parse_error(error)
                self._take(reply)
        except (exceptions.RedisError, OSError, IndexError) as error:
            detail = describe(error)
        finally:
            self.broken = True
            drop(self._connection)
            while self._waiting:
                self._waiting.popleft()[1](Reply(Kind.UNKNOWN, detail=detail))

    def _take(self, reply: Reply | None) -> None:
        request, on_reply = self._waiting[0]
        whole = self._assembly.add(request, reply)
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
        self.broken = True
        self._reader.cancel()
        drop(self._connection)


def open_node(spec: NodeSpec, prefix: str) -> RedisNode:
    """Return the node of a ``redis``, ``rediss``, ``unix``, ``valkey`` or ``valkeys`` URL."""
    if urlsplit(spec.url).scheme == "unix" and not urlsplit(spec.url).path:
        raise ValueError("a unix:// URL needs the path of a socket, such as unix:///run/valkey.sock")
    return RedisNode(spec, prefix)
