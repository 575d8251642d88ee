"""
Make redis-py connections to one server (internal).

redis-py opens the socket, with TLS, and packs commands; :mod:`.handshake` logs in.
The connections are made here, with explicit short timeouts, no retries and no pool: with the defaults of redis-py 8.1,
a silent node costs a client 59 seconds.
"""

import inspect
import re
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import connection as aioconnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.retry import Retry

from ...core.protocol import Failure
from ..base import LOGIN_UNREADABLE, LinkError, NodeSpec, address, is_local, unreadable
from .errors import link_error

ALIASES = {"valkey": "redis", "valkeys": "rediss"}

EXAMPLE = "redis://lock-1:6379/2"
# Always set here, whatever the URL contains and whatever redis-py's defaults are. redis-py would log in itself, and
# read the reply to its end, however long that is; see Dialer in link.py.
FIXED: dict[str, Any] = {
    "protocol": 2,
    "decode_responses": False,
    "health_check_interval": 0,
    "redis_connect_func": lambda connection: connection._parser.on_connect(connection),
}
# By default, redis-py sends the server its name and version, which needs an extra right. The argument changed in 7.
if "driver_info" in inspect.signature(AbstractConnection.__init__).parameters:
    FIXED |= {"driver_info": None}
else:
    FIXED |= {"lib_name": None, "lib_version": None}


# The options that have an effect, besides those of TLS.
USED = frozenset({"host", "port", "path", "db", "username", "password", "credential_provider", "client_name"})
USED |= {"encoding", "encoding_errors", "socket_type", "socket_keepalive_options"}
POOL = frozenset({"max_connections", "timeout"})  # what a URL may say about a pool, which is none of its connections


class ResolvedConnection(aioconnection.Connection):
    """
    A connection for an event loop to ``address``, which is one of the addresses of its host.

    asyncio would look the name up in a thread of the loop, and ``asyncio.run()`` waits for these at its end.
    """

    address = ""

    def _connection_arguments(self) -> Mapping[str, Any]:
        arguments = super()._connection_arguments()
        tls = {"server_hostname": self.host} if "ssl" in arguments else {}
        return {**arguments, **tls, "host": self.address or self.host}


class ResolvedSSLConnection(ResolvedConnection, aioconnection.SSLConnection):
    """The same with TLS; the certificate is compared with the host."""


ASYNC = {
    Connection: ResolvedConnection,
    SSLConnection: ResolvedSSLConnection,
    UnixDomainSocketConnection: aioconnection.UnixDomainSocketConnection,
}


def verification(
    ssl_cert_reqs: ssl.VerifyMode | str | None = "required", ssl_check_hostname: bool | None = None, **others: Any
) -> dict[str, Any]:
    """Return options that verify certificates and, by default, host names in every version of redis-py."""
    # Before version 6, redis-py accepted a valid certificate of any host. Some versions know only the words.
    how = "none" if ssl_cert_reqs is None else ssl_cert_reqs
    how = how.name.removeprefix("CERT_").lower() if isinstance(how, ssl.VerifyMode) else how
    check = ssl_check_hostname is not False and how != "none"
    return {"ssl_cert_reqs": how, "ssl_check_hostname": check}


def without_effect(option: str) -> bool:
    """Return whether an option of redis-py's connections has no effect on those that are made here."""
    return option not in USED and not option.startswith("ssl_")


def check_url(url: str) -> None:
    """
    Refuse a URL that redis-py would read differently from how it is meant.

    An unescaped ``/``, ``#`` or ``?`` in a password ends the address early, so that a part of the password becomes the
    host, the port or the database. No error message shows any part of the URL.

    Raises:
        ValueError: A character in the user name or password is not percent-encoded, the port is 0, the database is no
            number, or *url* is not one URL.
    """
    if "://" not in url:
        raise ValueError(f"its URL lacks the two slashes; write, for example, {EXAMPLE}")
    if re.search(r"[^+](redis|rediss|unix|valkey|valkeys)(\+cluster)?://", url):
        raise ValueError("it names several nodes: make each a separate item, or separate them by commas")
    try:
        scheme, place, path, query, _ = urlsplit(url)
    except ValueError:
        return  # redis-py cannot read the URL either, and its error is reported
    socket_path = scheme == "unix" and not place  # a path may have an @ in its name
    host = scheme == "unix" and not place.endswith("@") and place  # a path has no host
    if "#" in url or place.count("@") > 1 or "@" in query or ("@" in path and not socket_path) or host:
        raise ValueError(LOGIN_UNREADABLE)
    if scheme != "unix" and re.search(r":0+$", place):  # redis-py would take its default port
        raise ValueError(f"its port cannot be 0; write, for example, {EXAMPLE}")
    if scheme != "unix" and not re.fullmatch(r"(/[0-9]*)?", path):
        raise ValueError(f"its database number is not a number; write, for example, {EXAMPLE}")


class NoRetry(Retry):
    """Try only once. Each connection gets a copy, and redis-py's own copying takes a third of a connection's time."""

    def __init__(self) -> None:
        super().__init__(NoBackoff(), 0)

    def __deepcopy__(self, memo: Any) -> "NoRetry":
        return NoRetry()


class Endpoint:
    """
    Make connections, blocking or for an event loop, from the URL and the options of one server.

    The ``repr`` shows neither, because they may hold a password.

    Args:
        spec: The URL and options.

    Raises:
        ValueError: redis-py cannot make a connection from the URL and options.
    """

    def __init__(self, spec: NodeSpec) -> None:
        check_url(spec.url)
        scheme, rest = spec.url.split(":", 1)
        try:
            arguments: dict[str, Any] = dict(parse_url(f"{ALIASES.get(scheme, scheme)}:{rest}"))
        except ValueError:  # the message of urllib or redis-py may quote the URL
            raise unreadable("its address, port or database number", spec.url, EXAMPLE) from None
        self._class: type[AbstractConnection] = arguments.pop("connection_class", Connection)
        if not isinstance(self._class, type):
            raise ValueError("its option connection_class cannot be set; the scheme says it, such as rediss for TLS")
        self.ignored = frozenset(filter(without_effect, arguments))
        """The names of the options that only the URL has, which other programs may share, and that have no effect."""
        self._arguments = {name: value for name, value in arguments.items() if name not in POOL} | dict(spec.options)
        if re.search("[@/]", self.host):  # it would be shown, and it may have a password
            raise ValueError("its option host is no host: write, for example, 'lock-1', and the password as 'password'")
        if "://" in str(self._arguments.get("path", "")):
            raise ValueError("its option path is no path: write, for example, '/run/valkey.sock'")
        if issubclass(self._class, SSLConnection):
            self._arguments |= verification(**self._arguments)
        given = self._arguments
        self.options = frozenset(given)
        """The names of the connection's options, from the URL and the settings."""
        self.user = str(given.get("username") or "default")
        try:
            self.database = int(given.get("db") or 0)
        except (TypeError, ValueError, OverflowError):  # the message would quote the value
            raise ValueError("its option db is not a number") from None
        self.encrypted = issubclass(self._class, SSLConnection)
        self.verified = self.encrypted and given["ssl_cert_reqs"] != "none" and given["ssl_check_hostname"]
        """Whether connections are encrypted, and the certificate and the host's name are verified."""
        self.authenticated = bool(given.get("password") or given.get("credential_provider"))
        self.new(1.0)  # reports options that redis-py does not know when the settings are read
        if unused := sorted(filter(without_effect, spec.options)):
            raise ValueError(
                f"its OPTIONS set {', '.join(unused)}, which locks do not use: take that out. Timeouts come from "
                "OPTIONS['node_timeout'] of the alias, and no request is sent twice, because it could take a lock twice"
            )

    @property
    def address(self) -> str:
        """``host:port``, or the path of a Unix socket."""
        if self._class is UnixDomainSocketConnection:
            return str(self._arguments.get("path", ""))
        return address(self.host, self._arguments.get("port", 6379))

    @property
    def host(self) -> str:
        """The host's name or address."""
        return str(self._arguments.get("host", "localhost"))

    @property
    def remote(self) -> bool:
        """Whether connections leave this machine."""
        return self._class is not UnixDomainSocketConnection and not is_local(self.host)

    def explain(self, error: BaseException, connection: Any) -> LinkError:
        """Return what to report about a connection that could not be made; some servers ignore TLS without a word."""
        known = link_error(error)
        opened = getattr(connection, "_sock", None) or getattr(connection, "_reader", None)
        if known.failure is Failure.TIMEOUT and self.encrypted and not opened:
            return LinkError(Failure.TIMEOUT, f"{known.detail}, perhaps because it does not speak TLS")
        return known

    def follow(self, host: str, port: int) -> None:
        """Make all later connections to another server, with the same options."""
        self._arguments = self._arguments | {"host": host, "port": port}

    def new(self, timeout: float, **where: Any) -> AbstractConnection:
        """
        Return a blocking connection that is not open yet.

        Args:
            timeout: Seconds for each step: to connect, to send, to read.
            where: Options for this connection alone, such as ``host`` and ``port``.

        Raises:
            ValueError: redis-py refuses the options.
        """
        timeouts = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        fixed: dict[str, Any] = FIXED | timeouts | {"retry": NoRetry()}
        if self._class is not UnixDomainSocketConnection:
            fixed["socket_keepalive"] = True
        try:
            return self._class(**(self._arguments | fixed | where))
        except Exception as error:  # for a value that redis-py cannot use, it may be any
            _, found, rest = str(error).partition("unexpected keyword argument ")
            if not found:
                raise ValueError(f"redis-py refuses its options ({type(error).__name__})") from None
            unknown = rest.replace(". Did you", "; did you")  # from Python 3.12 on
            tls = "; it is for TLS: write rediss instead of redis in the scheme" if "'ssl_" in unknown else ""
            raise ValueError(f"redis-py's connection has no option {unknown}{tls}") from None

    def new_async(self, timeout: float, **where: Any) -> aioconnection.AbstractConnection:
        """
        Return a connection for an event loop that is not open yet.

        It has no read timeout: one task reads for as long as the link lives, and rounds have timeouts of their own.

        Args:
            timeout: Seconds to connect.
            where: Options for this connection alone, such as ``host`` and ``port``.
        """
        timeouts = {"socket_timeout": None, "socket_connect_timeout": timeout}
        fixed: dict[str, Any] = FIXED | timeouts | {"retry": AsyncRetry(NoBackoff(), 0)}
        connection: aioconnection.AbstractConnection = ASYNC[self._class](**(self._arguments | fixed | where))
        return connection
