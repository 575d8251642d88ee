"""Where the members of an etcd cluster are, and how to connect to them (internal)."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ..base import NodeSpec

PORT = 2379
EXAMPLE = "etcd://etcd-1:2379,etcd-2:2379,etcd-3:2379"
ENCODED = (
    "because characters such as @, #, / and ? must be percent-encoded in a user name or password (%40, %23, %2F, %3F); "
    "urllib.parse.quote(password, safe='') does it"
)
LOGIN = ("username", "password")
TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_cert_reqs", "ssl_check_hostname")
FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Place:
    """
    The addresses of some members, and the credentials for all of them.

    Args:
        members: Host and port of each.
        options: The options of the connection, by the names that redis-py gives to them.
        encrypted: Whether connections are encrypted.
    """

    members: tuple[tuple[str, int], ...]
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    encrypted: bool = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of all members, in one order."""
        return tuple(sorted(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.members))

    @property
    def local(self) -> bool:
        """Whether all members are on this machine."""
        return all(host in ("localhost", "::1") or host.startswith("127.") for host, _ in self.members)

    @cached_property
    def context(self) -> ssl.SSLContext | None:
        """How certificates are verified and which one is shown; None without encryption."""
        if not self.encrypted:
            return None
        context = ssl.create_default_context(cafile=self.options.get("ssl_ca_certs"))
        check = self.options.get("ssl_check_hostname", True)
        context.check_hostname = bool(check) and str(check).lower() not in FALSE
        if self.options.get("ssl_cert_reqs", "required") in ("none", None, ssl.CERT_NONE):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if certificate := self.options.get("ssl_certfile"):
            context.load_cert_chain(certificate, self.options.get("ssl_keyfile"), self.options.get("ssl_password"))
        return context


def read_place(spec: NodeSpec) -> Place:
    """
    Return the place that a URL and its options describe.

    Raises:
        ValueError: They cannot be used; the message shows nothing of the URL, which may hold a password.
    """
    if "#" in spec.url or spec.url.count("@") > 1:
        raise ValueError(f"its user name or password cannot be read, {ENCODED}")
    try:
        parts = urlsplit(spec.url)
        user, _, hosts = parts.netloc.rpartition("@")
        members = tuple(member(host) for host in hosts.split(","))
    except ValueError:
        # An unescaped / or ? in a password ends the hosts early.
        why = f", {ENCODED}" if "@" in spec.url else f"; write, for example, {EXAMPLE}"
        raise ValueError(f"its hosts or ports cannot be read{why}") from None
    if "@" in parts.path + parts.query:
        raise ValueError(f"its user name or password cannot be read, {ENCODED}")
    if parts.path not in ("", "/"):
        raise ValueError(f"etcd has neither a path nor database numbers: write {EXAMPLE}, and choose a KEY_PREFIX")
    name, _, password = user.partition(":")
    login = {"username": unquote(name), "password": unquote(password)} if user else {}
    options = {**login, **dict(parse_qsl(parts.query)), **spec.options}
    check_options(options, encrypted=parts.scheme == "etcds")
    return Place(members, options, parts.scheme == "etcds")


def member(host: str) -> tuple[str, int]:
    """Return the host and the port of a member; raises ValueError if there is none."""
    parts = urlsplit(f"//{host.strip()}")
    if not parts.hostname or parts.path or parts.query:
        raise ValueError(host)
    return parts.hostname, parts.port or PORT


def check_options(options: Mapping[str, Any], *, encrypted: bool) -> None:
    """Raise ValueError if there is an option that etcd does not take, or one that makes no difference."""
    known = (*LOGIN, *TLS)
    for option in options:
        if option not in known:
            raise ValueError(f"etcd has no option {option!r}; it has {', '.join(known)}")
        if option in TLS and not encrypted:
            raise ValueError(f"its option {option!r} is for TLS: write etcds:// instead of etcd://")
    if bool(options.get("username")) != bool(options.get("password")):
        raise ValueError("etcd needs a user name and a password, or neither: write etcd://user:password@etcd-1")
    if options.get("ssl_keyfile") and not options.get("ssl_certfile"):
        raise ValueError("its ssl_keyfile belongs to a certificate: add ssl_certfile")
