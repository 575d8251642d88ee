"""How a node is reached: TLS, credentials, sockets, addresses, databases; and the errors if it is not."""

import asyncio
import os
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from django_redlock import LockManager, LockTakenError, QuorumUnavailableError, locks
from django_redlock.nodes import LinkError, NodeSpec
from django_redlock.nodes.backends import open_node
from django_redlock.testing import Server, Servers, start_servers
from tests.certificates import Certificates, tls_server
from tests.endurance.test_acl import RIGHTS
from tests.managers import Blocking, Flavour, manager_over

pytestmark = pytest.mark.xdist_group("transport")  # certificates and a server with TLS are made once

LOGIN = "app:s3same%40:x@"  # the password is s3same@:x


def manager_of(*urls: str, **options: Any) -> LockManager:
    limits = {"ttl": 60.0, "node_timeout": options.pop("node_timeout", 10.0)}
    return manager_over([open_node(NodeSpec(url, options=options), "t:") for url in urls], **limits)


async def works(flavour: Flavour, *urls: str, **options: Any) -> None:
    """Take, extend and release a lock on the node."""
    manager = manager_of(*urls, **options)
    lease = await flavour.acquire(manager.lock("a", wait=0))
    assert await flavour.extend(lease)
    assert await flavour.release(lease) == "released"


async def complaint(flavour: Flavour, url: str, *, at_once: bool, attempts: int = 1, **options: Any) -> str:
    """Fail to take a lock, at once if only new settings can help; return what the error says about the node."""
    manager = manager_of(url, **options)
    with pytest.raises(QuorumUnavailableError) as caught:
        await flavour.acquire(manager.lock("a", wait=60 if at_once else 0))
    assert caught.value.attempts <= attempts
    assert caught.value.misconfigured is at_once
    assert "s3same" not in str(caught.value) + repr(caught.value) + repr(manager.nodes)
    (said,) = caught.value.nodes.values()
    return said


# TLS


async def test_tls_with_an_authority_of_ones_own(secure: Server, certificates: Certificates, flavour: Flavour):
    """The certificate is verified against the authority that the node's OPTIONS name."""
    for scheme, host in (("rediss", "localhost"), ("rediss", "127.0.0.1"), ("valkeys", "localhost")):
        await works(flavour, f"{scheme}://{host}:{secure.port}/0", ssl_ca_certs=certificates["ca.crt"])


async def test_verification_can_be_switched_off_by_name(tls: Certificates, flavour: Flavour):
    """Some managed servers need unverified TLS; it is possible, but never the default."""
    with tls_server(tls, "elsewhere") as server:
        url = f"rediss://localhost:{server.port}/0"
        for off in ("none", None, ssl.CERT_NONE):
            await works(flavour, url, ssl_cert_reqs=off)
        await works(flavour, url, ssl_ca_certs=tls["ca.crt"], ssl_check_hostname=False)


async def test_tls_carries_much_in_both_directions(secure: Server, certificates: Certificates, flavour: Flavour):
    """Requests that are too large for a socket's buffer, and replies of more than one record of TLS."""
    names = [f"{number}".rjust(400, "x") for number in range(3000)]
    manager = manager_of(f"rediss://localhost:{secure.port}/0", ssl_ca_certs=certificates["ca.crt"])
    lease = await flavour.acquire(manager.lock(names, wait=0))
    (listed,) = manager.survey(count=500).values()
    (alisted,) = (await manager.asurvey(count=500)).values()

    assert (len(listed.rows), len(alisted.rows), listed.total) == (500, 500, 3000)
    assert await flavour.release(lease) == "released"
    await manager.aclose()


async def test_client_certificate(tls: Certificates, flavour: Flavour):
    """A server may require client certificates; the error says so to a client without one."""
    with tls_server(tls, clients="yes") as server:
        url = f"rediss://localhost:{server.port}/0"
        own = {"ssl_certfile": tls["client.crt"], "ssl_keyfile": tls["client.key"]}
        await works(flavour, url, ssl_ca_certs=tls["ca.crt"], **own)

        # The server hangs up with an alert, which is read only if it comes before the next byte is written.
        said = await complaint(flavour, url, ssl_ca_certs=tls["ca.crt"], at_once=True, attempts=100)

    assert said == "wants a client certificate"


async def test_certificate_that_is_not_good_enough_is_refused(secure: Server, tls: Certificates, flavour: Flavour):
    """An unknown authority, another host and an expired certificate have different errors, and give no vote."""
    authority = {"ssl_ca_certs": tls["ca.crt"]}
    with tls_server(tls, "elsewhere") as elsewhere, tls_server(tls, "expired") as expired:
        urls = [f"rediss://{LOGIN}localhost:{one.port}/0" for one in (secure, elsewhere, expired)]

        unknown = await complaint(flavour, urls[0], at_once=True)
        stranger = await complaint(flavour, urls[0], ssl_ca_certs=tls["stranger.crt"], at_once=True)
        named = await complaint(flavour, urls[1], **authority, at_once=True)
        old = await complaint(flavour, urls[2], **authority, at_once=True)

    assert unknown.startswith("certificate refused, ")
    assert stranger.startswith("certificate refused, ")
    assert named == "has a certificate for another host"
    assert old == "certificate refused, certificate has expired"


async def test_file_of_the_authority_that_is_missing_is_named(secure: Server, flavour: Flavour):
    """A typing error in a path is not reported as an unreachable node."""
    url = f"rediss://localhost:{secure.port}/0"
    assert await complaint(flavour, url, ssl_ca_certs="/no/such/file", at_once=False) == "no such file"


async def test_tls_on_one_side_only(secure: Server, certificates: Certificates, nodes: Servers, flavour: Flavour):
    """TLS to a plain server, and the reverse, are reported as a wrong connection."""
    plain = f"rediss://127.0.0.1:{nodes[0].port}/0"
    # Redis waits for the end of a line that does not come.
    authority = {"ssl_ca_certs": certificates["ca.crt"]}
    said = await complaint(flavour, plain, **authority, node_timeout=0.3, at_once=False)
    assert said.removesuffix(", perhaps because it does not speak TLS") in ("TLS failed", "timeout")
    node = open_node(NodeSpec(plain, options=authority), "t:")
    with pytest.raises(LinkError, match=r"timeout, perhaps because it does not speak TLS|TLS failed"):
        node.connect(0.3) if isinstance(flavour, Blocking) else await node.aconnect(0.3)
    said = await complaint(flavour, f"redis://127.0.0.1:{secure.port}/0", at_once=False)
    assert said in ("closed", "reset", "malformed reply")


# Credentials, addresses, databases


async def test_connections_have_names_on_the_server(nodes: Servers, flavour: Flavour):
    """``CLIENT LIST`` shows package, alias and process, which needs no right, or the name that a project chose."""
    with nodes[0].client() as client:
        rights = [right for right in RIGHTS if right.startswith("+")]
        client.execute_command("ACL", "SETUSER", "app", "reset", "on", ">there", "~*", "&*", *rights)
        client.acl_log_reset()
        url = nodes.urls[0].replace("//", "//app:there@")
        entries = {"shop floor": {"NODES": [url]}, "own": {"NODES": [f"{nodes.urls[0]}?client_name=web-1"]}}
        with override_settings(REDLOCK=entries):
            for alias in entries:
                lease = await flavour.acquire(locks[alias].lock("a", wait=0))
                with pytest.raises(LockTakenError):
                    await flavour.acquire(locks[alias].lock("a", wait=0.2))
                await flavour.release(lease)
            names = [(about["user"], about["name"]) for about in client.client_list() if about["name"]]
            refused = client.acl_log()
            for alias in entries:
                await flavour.close(locks[alias])
            locks.reset()
        client.execute_command("ACL", "DELUSER", "app")

    expected = [("app", f"django_redlock:shop?floor:{os.getpid()}"), ("default", "web-1")]
    assert set(names) == set(expected)
    assert min(map(names.count, expected)) >= 2
    assert refused == []


async def test_user_and_password(flavour: Flavour):
    """An ACL user works, with any characters in the password; wrong credentials are reported and not shown."""
    with start_servers(1) as servers, servers[0].client() as client:
        client.execute_command("ACL", "SETUSER", "app", "on", ">s3same@:x", "~*", "&*", "+@all")
        client.execute_command("ACL", "SETUSER", "default", "off")
        at = f"127.0.0.1:{servers[0].port}/0"

        await works(flavour, f"redis://{LOGIN}{at}")
        await works(flavour, f"redis://{at}", username="app", password="s3same@:x")
        wrong = [
            await complaint(flavour, f"redis://{user}:s3same@{at}", at_once=True) for user in ("app", "nobody", "")
        ]
        missing = await complaint(flavour, f"redis://{at}", at_once=True)

    assert (wrong, missing) == (["WRONGPASS", "WRONGPASS", "has no password"], "NOAUTH")


async def test_unix_socket(flavour: Flavour, tmp_path: Path):
    """A server on the same machine can be reached without a port; its path is its name."""
    path = tmp_path / "lock.sock"
    with Server(args=("--unixsocket", str(path))) as server:
        await works(flavour, f"unix://{path}", db=3)
        with server.client() as client:
            assert list(client.info("keyspace")) == ["db3"]
        assert open_node(NodeSpec(f"unix://{path}"), "t:").name == str(path)
    assert await complaint(flavour, f"unix://{path}", at_once=False) == "no such file"


async def test_ipv6(flavour: Flavour):
    """An address in brackets, in the URL and in the node's name."""
    with Server(args=("--bind", "127.0.0.1", "::1")) as server:
        url = f"redis://[::1]:{server.port}/0"
        await works(flavour, url)
        assert open_node(NodeSpec(url), "t:").name == f"[::1]:{server.port}"


async def test_database_number(flavour: Flavour):
    """Locks are in the database of the URL; a number that the server does not have is a configuration error."""
    with Server() as server:
        url = server.url.removesuffix("/0")
        await works(flavour, f"{url}/5")
        with server.client() as client:
            assert list(client.info("keyspace")) == ["db5"]

        assert await complaint(flavour, f"{url}/99", at_once=True) == "no such database"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://localhost:1", "refused"),
        ("redis://lock-1.invalid:6379", "unknown host"),
        ("redis://lock-1..internal:6379", "unknown host"),
    ],
)
async def test_node_that_is_not_there(flavour: Flavour, url: str, said: str):
    """Refused connections and unknown hosts have different errors."""
    assert await complaint(flavour, url, at_once=False) == said


def test_event_loop_ends_while_a_look_up_hangs(monkeypatch: pytest.MonkeyPatch):
    """The resolver may take half a minute to give up; ``asyncio.run()`` waits for the loop's own threads at its end."""
    look_up, over, ended = socket.getaddrinfo, threading.Event(), []

    def hang(host: Any, *about: Any, **more: Any) -> Any:
        if host != "lock-1.invalid":
            return look_up(host, *about, **more)
        over.wait(10)
        ended.append(host)
        raise socket.gaierror("no answer")

    async def try_once() -> None:
        manager = manager_of("redis://lock-1.invalid:6379", node_timeout=0.1)
        with pytest.raises(QuorumUnavailableError):
            await manager.lock("a", wait=0).aacquire()
        await manager.aclose()

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    asyncio.run(try_once())

    assert ended == []
    over.set()
