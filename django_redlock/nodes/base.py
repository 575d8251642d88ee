"""
The interface of a node: a name, and links that carry requests and replies in order (internal).
"""

import asyncio
import errno
import json
import re
import socket
import ssl
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from urllib.parse import SplitResult, urlsplit

from ..core.admission import Greeting
from ..core.protocol import Failure, Kind, Reply, Request, failed
from ..exceptions import printable
from ..runtime.clock import steady

T = TypeVar("T")

Packed = dict[int, list[bytes]]
"""The bytes of the requests of a round, which several nodes are sent, but for what is each node's own between them."""

ENCODED = (
    "because characters such as @, #, / and ? must be percent-encoded in a user name or password (%40, %23, %2F, %3F); "
    "urllib.parse.quote(password, safe='') does it"
)
LOGIN_UNREADABLE = f"its user name or password cannot be read, {ENCODED}"
"""The error about a URL with a user that cannot be read."""


def unreadable(what: str, url: str, example: str) -> ValueError:
    """Return the error about a part of a URL; it shows nothing of the URL, which may hold a password."""
    # An unescaped / or ? in a password ends the hosts early, and what is left of the password is no port.
    why = f", {ENCODED}" if "@" in url else f"; write, for example, {example}"
    return ValueError(f"{what} cannot be read{why}")


INCOMPLETE = failed(Failure.INCOMPLETE, Kind.UNKNOWN)
"""Stands for a reply that has not arrived, or not completely."""


def split_url(url: str) -> SplitResult:
    """
    Return the parts of a URL, which may name several hosts; since Python 3.14, urllib accepts brackets around one only.

    Raises:
        ValueError: The URL cannot be read.
    """
    scheme, mark, rest = url.partition("://")
    hosts = re.split("[/?#]", rest, maxsplit=1)[0]
    if "," not in hosts:
        return urlsplit(url)
    if re.search(r"[\[\]].*@", hosts):
        raise ValueError("brackets in the user name or password")
    return urlsplit(f"{scheme}{mark}{rest[len(hosts) :]}")._replace(netloc=hosts)


def address(host: str, port: int) -> str:
    """Return the address of a server as text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_local(host: str) -> bool:
    """Return whether a host is this machine, as far as its name shows."""
    return host in ("localhost", "::1") or host.startswith("127.")


LONGEST_TEXT = 300  # characters


def shown(text: str) -> str:
    """Return what a node says for people, as one short line that moves no cursor; all such text comes through here."""
    return printable(text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…")


class LinkError(Exception):
    """
    A node could not be reached or a link to it broke.

    Args:
        failure: The reason.
        detail: A few words for people, without address or credentials; if empty, the words of the failure.
    """

    def __init__(self, failure: Failure, detail: str = "") -> None:
        super().__init__(failure, detail)
        self.failure = failure
        self.detail = shown(detail) or failure.value

    def __str__(self) -> str:
        return self.detail

    def reply(self, kind: Kind = Kind.FAILED) -> Reply:
        """Return a reply that stands in for the reply of the node."""
        return failed(self.failure, kind, self.detail)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """
    An entry of ``NODES``, as a class of nodes gets it.

    Args:
        url: The node's URL; it may hold a password, so it is never shown. Empty if an entry with ``BACKEND`` has none.
        name: The node's name in messages and pages; if empty, it is derived from the address.
        options: ``OPTIONS``: what a URL cannot carry, such as arguments for a connection; never shown either.
        sentinels: URLs of the sentinels to ask where the master is; the host of ``url`` is then the service's name.
        masters: The hosts that may be the master that other servers name; none if any host may.
        alias: The alias in ``REDLOCK``, for the names of connections.
        backend: ``BACKEND``, the dotted path of the node's class; empty if the scheme of the URL says which.
    """

    url: str = field(repr=False)
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    sentinels: tuple[str, ...] = field(default=(), repr=False)
    masters: tuple[str, ...] = ()
    alias: str = ""
    backend: str = ""


MOST_JSON_PARTS = 65_536  # commas, lists and objects; a record of 20,000 holders who share a lock has fewer
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def parse_json(text: str | bytes) -> Any:
    """
    Return the value of a JSON text from a node.

    Two megabytes of empty lists would become fifty of objects, so the parts are counted before.

    Raises:
        ValueError: The text is not JSON, has too many parts, or has a text that UTF-8 cannot encode.
        RecursionError: Its lists are nested too deeply.
    """
    whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    if _parts(whole) > MOST_JSON_PARTS and _parts(_STRING.sub("", whole)) > MOST_JSON_PARTS:
        raise ValueError("lists without end")
    found = json.loads(whole, strict=False)
    if "\\ud" in whole or "\\uD" in whole:  # perhaps half a surrogate pair, which no request can name
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _parts(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")


class RateLimit:
    """
    Counts what a node sends without being asked. A node that never pauses would keep a thread or a task busy.

    Args:
        most: How much it may send within a second.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._until = 0.0

    def count(self, number: int = 1) -> None:
        """Raise LinkError if the node has sent too much."""
        if (now := steady()) > self._until:
            self._until, self._left = now + 1.0, self._most
        self._left -= number
        if self._left < 0:
            raise LinkError(Failure.MALFORMED)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits for an event loop, because it was given blocking functions to call."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("a blocking call was suspended")


async def until_cancelled() -> None:
    """Do nothing until cancelled; as a link's task, this makes the link end with the tasks of its event loop."""
    await asyncio.get_running_loop().create_future()


class Link(Protocol):
    """
    One ordered, blocking connection to a node. Requests are executed in the order in which they are sent.
    """

    greeting: Greeting
    """How the node described itself when the link was made."""

    def fileno(self) -> int:
        """Return the descriptor to poll, or -1 if a reply is there as soon as the request is sent."""

    def greet(self) -> None:
        """
        Ask the node to describe itself again; :meth:`receive_greeting` takes the answer in its turn.

        Raises:
            LinkError: The link broke.
        """

    def receive_greeting(self) -> Greeting | None:
        """
        Take the answer to :meth:`greet`, whose turn it is; None if not all of it has arrived. Never block.

        Raises:
            LinkError: The link broke, the node cannot be used any more, or its memory is another one.
        """

    def send(self, request: Request, packed: Packed, *, in_full: bool = False) -> None:
        """
        Send a request; *packed* keeps its bytes for the other nodes of the round.

        With *in_full*, the request does not rely on anything that the node learned from an earlier one.

        Raises:
            LinkError: The link broke; the request may have arrived.
        """

    def receive(self, request: Request) -> Reply | None:
        """
        Take the reply to *request*, the oldest request without a reply; never block.

        None means that the request must be sent again in full. ``INCOMPLETE`` means that not all of the reply has
        arrived.

        Raises:
            LinkError: The link broke.
        """

    def readable(self) -> bool:
        """Return whether a complete reply, or the end of the connection, is waiting; never block."""

    def close(self) -> None:
        """Drop the connection at once, without reading."""


class NotificationLink(Protocol):
    """A connection on which a node notifies the waiters of a process that are first in a queue."""

    def fileno(self) -> int:
        """Return the descriptor to poll, or -1 if the node calls back by itself."""

    def read(self) -> list[str]:
        """
        Return the waiters that were notified, without blocking.

        Raises:
            LinkError: The link broke.
        """

    def close(self) -> None:
        """Drop the connection."""


class AsyncNotificationLink(Protocol):
    """A :class:`NotificationLink` for an event loop."""

    async def read(self) -> list[str]:
        """Wait for notifications and return the waiters that they name; raise LinkError if the link breaks."""

    def close(self) -> None:
        """Drop the connection at once."""


class AsyncLink(Protocol):
    """One ordered connection to a node, shared by all tasks of an event loop."""

    greeting: Greeting
    """How the node described itself when the link was made."""

    def greet(self, on_greeting: Callable[[Greeting], object]) -> None:
        """
        Ask the node to describe itself again, without blocking; *on_greeting* gets the answer later, if one comes.

        Raises:
            LinkError: The link is broken; nothing was sent.
        """

    def send(
        self,
        request: Request,
        packed: Packed,
        on_reply: Callable[[Reply | None], bool],
        *,
        in_full: bool = False,
    ) -> None:
        """
        Send a request without blocking; *on_reply* gets the reply later.

        If the node needs the request again, in full, *on_reply* is called with None. It then returns whether the
        request is still wanted.

        Raises:
            LinkError: The link is broken; nothing was sent.
        """

    @property
    def broken(self) -> bool:
        """Whether the connection is gone."""

    def readable(self) -> bool:
        """Return whether data has arrived that the event loop has not delivered yet."""

    def close(self) -> None:
        """Drop the connection at once."""


class Node(Protocol):
    """A node, which has one vote. A kind that can be asked more has ``inspect``, too; see :mod:`.inspection`."""

    name: str
    """The node's name in messages and pages, never its URL."""

    address: str
    """The node's address without scheme and credentials, so that two entries for one server are noticed."""

    instant: bool
    """Whether the node connects and answers without waiting for anything."""

    calls: bool
    """Whether the node can notify waiters of their turn; otherwise they poll it."""

    fails_over: bool
    """Whether another server, which may lack the last writes, can take the node's place."""

    def connect(self, timeout: float) -> Link:
        """
        Open a link; block for at most *timeout* seconds.

        Raises:
            LinkError: The node cannot be reached.
        """

    async def aconnect(self, timeout: float) -> AsyncLink:
        """Open a link for the running event loop, or raise LinkError, within about *timeout* seconds."""

    def listen(self, process: str, timeout: float, on_notification: Callable[[str], object]) -> NotificationLink:
        """
        Open a link for the notifications to a process; block for at most *timeout* seconds.

        A node whose link has no file descriptor calls *on_notification* by itself, in any thread.

        Raises:
            LinkError: The node cannot be reached.
        """

    async def alisten(
        self, process: str, timeout: float, on_notification: Callable[[str], object]
    ) -> AsyncNotificationLink:
        """Open a link for the notifications to the running event loop, within about *timeout* seconds."""


# OpenSSL's codes for a certificate that is valid, but not for this host name or address.
WRONG_NAME = (62, 64)
EXPIRED = 10


def known_cause(error: BaseException) -> LinkError | None:
    """Return what to report about an error of the operating system or of TLS, if it shows what happened."""
    failure = Failure.REFUSED if f"Errno {errno.ECONNREFUSED}" in str(error) else None
    match error:
        case ssl.SSLCertVerificationError():
            if error.verify_code in WRONG_NAME:
                failure = Failure.WRONG_CERTIFICATE
            elif error.verify_code == EXPIRED:
                failure = Failure.CERTIFICATE_EXPIRED
            else:
                why = f"{Failure.CERTIFICATE_REFUSED.value}, {error.verify_message}"
                return LinkError(Failure.CERTIFICATE_REFUSED, why)
        case ssl.SSLEOFError(reason=None):
            # A server that refuses a client's certificate ends the connection. If the client is sending at that moment,
            # this error comes before the server's reason.
            failure = Failure.RESET
        case ssl.SSLError():
            # Servers written in Go report a missing certificate as a bad one.
            wanted = any(
                alert in (getattr(error, "reason", None) or "") for alert in ("CERTIFICATE_REQUIRED", "BAD_CERTIFICATE")
            )
            failure = Failure.NO_CLIENT_CERTIFICATE if wanted else Failure.TLS_FAILED
        case OSError(errno=errno.EMFILE | errno.ENFILE):
            failure = Failure.OPEN_FILES
        case socket.gaierror():
            failure = Failure.UNKNOWN_HOST
        case UnicodeError() if not isinstance(error, UnicodeDecodeError):  # Python refuses to look such a name up
            failure = Failure.UNKNOWN_HOST
        case FileNotFoundError():
            failure = Failure.NO_SUCH_FILE
        case ConnectionRefusedError():
            failure = Failure.REFUSED
        case ConnectionError():
            failure = Failure.RESET
        case ValueError():
            failure = Failure.MALFORMED
    return failure and LinkError(failure)
