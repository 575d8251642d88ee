"""Real etcd for the tests: one member, or a cluster of three whose members are killed, frozen, wiped and cut off."""

import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from subprocess import CalledProcessError, Popen, run
from time import monotonic
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from django_redlock.testing import FaultProxy
from django_redlock.testing.servers import reserve_port
from tests.services import APART, Members, Service
from tests.waiting import wait_until


class Member(Service):
    """A member of an etcd cluster, alone unless :attr:`cluster` names others."""

    scheme = "etcd"
    program = "etcd"
    remedy = "apt-get install etcd-server"
    user = ""

    def __init__(
        self, *, alone: bool = True, options: tuple[str, ...] = (), certificates: dict[str, str] | None = None
    ) -> None:
        self._certificates = certificates
        super().__init__()
        self._peer = reserve_port(self)
        self.cluster: dict[str, str] = {self.folder.name: f"http://127.0.0.1:{self._peer}"}
        self.state = "new"
        self.proxy: FaultProxy | None = None  # between the other members and this one
        self.launcher: tuple[str, ...] = ()  # what starts it
        timing = ("--heartbeat-interval", "20", "--election-timeout", "200") if alone else ()
        self.options = (*timing, *options)

    @property
    def peer(self) -> str:
        """The URL at which it listens to the other members."""
        return f"http://127.0.0.1:{self._peer}"

    @property
    def advertised(self) -> str:
        """The URL at which the other members reach it."""
        return self.proxy.url if self.proxy else self.peer

    @property
    def http(self) -> str:
        """The URL at which clients reach it, as HTTP."""
        return self.url.replace("etcd://", "https://" if self._certificates else "http://", 1)

    def private_url(self) -> str:
        return f"etcd://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        (self.folder / "data").mkdir(mode=0o700)

    def launch(self) -> Popen[bytes]:
        return self.spawn(
            *self.launcher,
            self.find(),
            *("--name", self.folder.name),
            *("--data-dir", str(self.folder / "data")),
            *("--listen-client-urls", self.http),
            *("--advertise-client-urls", self.http),
            *("--listen-peer-urls", self.peer),
            *("--initial-advertise-peer-urls", self.advertised),
            *("--initial-cluster", ",".join(f"{name}={url}" for name, url in self.cluster.items())),
            *("--initial-cluster-state", self.state),
            *("--logger", "zap", "--log-level", "error"),
            *self.options,
            ETCD_UNSUPPORTED_ARCH="arm64",  # Debian has it there; the tests do not need its support
            GOMAXPROCS="1",  # with the next line, a third less processor time
            GOGC="500",
        )

    def ask(self, path: str, body: Mapping[str, Any], timeout: float = 5.0, token: str = "") -> dict[str, Any]:
        """Return the reply of the JSON gateway; *token* is that of a login."""
        request = Request(
            f"{self.http}/v3/{path}", json.dumps(body).encode(), {"Authorization": token} if token else {}
        )
        context = None
        if self._certificates:
            context = ssl.create_default_context(cafile=self._certificates["ssl_ca_certs"])
            context.load_cert_chain(self._certificates["ssl_certfile"], self._certificates["ssl_keyfile"])
        try:
            with urlopen(request, timeout=timeout, context=context) as response:
                reply: dict[str, Any] = json.load(response)
        except HTTPError as error:
            error.close()  # Python 3.14 warns of the response in it
            raise
        return reply

    def ping(self) -> None:
        status = self.ask("maintenance/status", {})
        assert int(status.get("leader", 0))
        self.ask("kv/range", {"key": "cGluZw=="})

    def clear(self) -> None:
        """Delete all keys of the tests."""
        self.ask("kv/deleterange", {"key": "AA==", "range_end": "AA=="})

    @property
    def leads(self) -> bool:
        """Whether it is the leader."""
        status = self.ask("maintenance/status", {})
        return bool(status.get("leader")) and status["leader"] == status["header"]["member_id"]


class Cluster(Members):
    """Three members."""

    def replace(self, member: Member) -> None:
        """Have a member that lost its data join again, as a new member with the same address."""
        helper = next(one for one in self.members if one is not member)

        def listed() -> list[str]:
            known = helper.ask("cluster/member/list", {})["members"]
            return [one["ID"] for one in known if member.advertised in one["peerURLs"]]

        def removed() -> bool:
            for gone in listed():
                helper.ask("cluster/member/remove", {"ID": gone})
            return not listed()

        def added() -> bool:
            if not listed():
                helper.ask("cluster/member/add", {"peerURLs": [member.advertised]})
            return bool(listed())

        wait_until(removed, despite=OSError)  # each of them again if its reply was lost, as when there is no leader
        wait_until(added, despite=OSError)
        member.state = "existing"
        member.start()


def clock_ahead(seconds: int) -> tuple[str, ...]:
    """Return what starts a program whose monotonic clock is ahead by some seconds; nothing if that is not possible."""
    command = ("unshare", "--time", "--monotonic", str(seconds), "--boottime", str(seconds))
    show = ("python3", "-c", "import time; print(time.monotonic())")
    try:
        shown = float(run([*command, *show], capture_output=True, check=True).stdout)
    except (OSError, CalledProcessError):
        return ()
    return command if shown > monotonic() + seconds / 2 else ()


@contextmanager
def cluster(*options: str) -> Iterator[Cluster]:
    """Start three members with the usual timing, proxies and clocks that differ: an election takes a second or two."""
    members = [Member(alone=False, options=options) for _ in range(3)]
    with ExitStack() as stack:
        for member in members:
            member.proxy = stack.enter_context(FaultProxy(member.peer))
        peers = {member.folder.name: member.advertised for member in members}
        for member in members:
            member.cluster = peers
            member.launcher = clock_ahead(members.index(member) * APART)
            member.prepare()
            member._process = member.launch()
        for member in members:
            stack.enter_context(member)
        yield Cluster(members)
