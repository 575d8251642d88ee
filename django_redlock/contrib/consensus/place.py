"""
Where a replicated store is: the addresses of its members, the login, and how to verify certificates (internal).
"""

import os
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from ...core.protocol import Failure
from ...nodes.base import LOGIN_UNREADABLE, LinkError, NodeSpec, address, split_url, unreadable


class Member(Protocol):
    """A connection to one member."""

    @property
    def ended(self) -> bool:
        """Whether the member is known to have ended the connection."""

    def open(self) -> None:
        """Connect, and authenticate if there is a user."""

    def wait(self, timeout: float) -> None:
        """Wait for at most the given seconds for each reply from now on."""

    def close(self) -> None:
        """Close the connection."""

    def abort(self) -> None:
        """Make a call that waits for the member fail at once; any thread may call this."""


@dataclass(frozen=True)
class Store:
    """
    A kind of store, with the form of its URLs.

    Args:
        name: The name in messages.
        scheme: The scheme of its URLs; with ``s`` at the end, connections are encrypted.
        port: The default port.
        encrypted_port: The default port of encrypted connections.
        example: A valid URL.
        check_path: Raises ValueError if a URL must not have a path, given without a slash at its end.
        more: The options that it takes in addition to those for the login and for TLS.
    """

    name: str
    scheme: str
    port: int
    encrypted_port: int
    example: str
    check_path: Callable[[str], object]
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """
    The addresses of some members, and the credentials for all of them.

    Args:
        members: Host and port of each.
        options: The options of the connection, under redis-py's names.
        encrypted: Whether connections are encrypted.
        path: The path of the URL, without a slash at its end.
    """

    members: tuple[tuple[str, int], ...]
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    encrypted: bool = False
    path: str = ""

    @property
    def verifies(self) -> bool:
        """Whether certificates are verified, if connections are encrypted."""
        return self.options.get("ssl_cert_reqs", "required") not in ("none", None, ssl.CERT_NONE)

    @property
    def verifies_hosts(self) -> bool:
        """Whether certificates must be those of the hosts, too."""
        check = self.options.get("ssl_check_hostname", True)
        return self.verifies and bool(check) and str(check).lower() not in FALSE

    @property
    def context(self) -> ssl.SSLContext | None:
        """
        How to verify certificates, and which one to present; None without encryption.

        The files are read each time, because they are replaced while the process runs.

        Raises:
            LinkError: A file named in the options cannot be used.
        """
        if not self.encrypted:
            return None
        for option in FILES:
            path = self.options.get(option)
            if path and not (os.path.isfile(path) and os.access(path, os.R_OK)):
                raise LinkError(Failure.UNUSABLE, f"cannot be used, because its {option} does not name a readable file")
        try:
            context = ssl.create_default_context(cafile=self.options.get("ssl_ca_certs"))
            context.check_hostname = self.verifies_hosts
            if not self.verifies:
                context.verify_mode = ssl.CERT_NONE
            if certificate := self.options.get("ssl_certfile"):
                password = self.options.get("ssl_password") or ""  # without any, OpenSSL would ask at the terminal
                context.load_cert_chain(certificate, self.options.get("ssl_keyfile"), password)
            return context
        except ssl.SSLError as error:
            why = error.reason or "a key may need another ssl_password"
            text = f"cannot be used: TLS refuses a file of its ssl_ options ({why})"
            raise LinkError(Failure.UNUSABLE, text) from None


LOGIN = ("username", "password")

TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_cert_reqs", "ssl_check_hostname")

FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")

FALSE = ("0", "false", "no", "off")


def read_place(spec: NodeSpec, store: Store) -> Place:
    """
    Return the place that a URL and its options describe.

    Raises:
        ValueError: They cannot be used; the message shows nothing of the URL, which may hold a password.
    """
    if spec.url.count("://") > 1:
        raise ValueError("it names several nodes: make each a separate item, or write all NODES as one string")
    if "#" in spec.url or spec.url.count("@") > 1:
        raise ValueError(LOGIN_UNREADABLE)
    try:
        parts = split_url(spec.url)
        encrypted = parts.scheme == f"{store.scheme}s"
        user, _, hosts = parts.netloc.rpartition("@")
        port = store.encrypted_port if encrypted else store.port
        members = tuple(member(host, port) for host in hosts.split(","))
    except ValueError:
        raise unreadable("its hosts or ports", spec.url, store.example) from None
    if "@" in parts.path + parts.query:
        raise ValueError(LOGIN_UNREADABLE)
    path = unquote(parts.path).rstrip("/")
    store.check_path(path)
    name, _, password = user.partition(":")
    login = {"username": unquote(name), "password": unquote(password)} if user else {}
    options = {**login, **dict(parse_qsl(parts.query)), **spec.options}
    check_options(options, store, encrypted=encrypted)
    return Place(members, options, encrypted, path)


def member(host: str, port: int) -> tuple[str, int]:
    """Return the host and the port of a member; *port* is the default. Raise ValueError if there is no host."""
    parts = urlsplit(f"//{host.strip()}")
    if not parts.hostname or parts.path or parts.query or parts.port == 0 or re.search(r"[\s;]", parts.hostname):
        raise ValueError(host)
    return parts.hostname, parts.port or port


def check_options(options: Mapping[str, Any], store: Store, *, encrypted: bool) -> None:
    """Raise ValueError for an option that the store does not take, or that has no effect."""
    known = (*LOGIN, *store.more, *TLS)
    for option in options:
        if option not in known:
            raise ValueError(f"{store.name} has no option {option!r}; it has {', '.join(known)}")
        if option in TLS and not encrypted:
            scheme = store.scheme
            raise ValueError(f"its option {option!r} is for TLS: write {scheme}s:// instead of {scheme}://")
    if bool(options.get("username")) != bool(options.get("password")):
        host = address(*member(split_url(store.example).netloc.split(",")[0], store.port)).rpartition(":")[0]
        raise ValueError(
            f"{store.name} needs a user name and a password, or neither: write {store.scheme}://user:password@{host}"
        )
    if options.get("ssl_keyfile") and not options.get("ssl_certfile"):
        raise ValueError("its ssl_keyfile belongs to a certificate: add ssl_certfile")
