"""Every error reply has one meaning: no vote. Real servers in the real state give each of them."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest
import redis
from django.test import override_settings

from django_redlock import LockManager, QuorumUnavailableError, locks
from django_redlock.testing import Server, Servers
from tests.managers import Flavour, eventually, real_manager, wait_until

USER = "ACL SETUSER worker on >sesame ~* &* +@all"
WORKER = "worker:sesame@"
REPLICAS, STALE = "CONFIG SET min-replicas-to-write", "CONFIG SET replica-serve-stale-data"
DEMOTE, PROMOTE = "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"
NOW, LATER = True, False


@dataclass(frozen=True)
class State:
    """A state of a server."""

    cold: str  # the code in the lock's error if the connection is new
    warm: str  # the code if the connection is older than the state; nothing if it gets no error then
    before: tuple[str, ...]  # the commands that bring the server into the state
    after: tuple[str, ...]  # the commands that end it
    at_once: bool  # whether nobody waits for such a node
    login: str = ""  # the credentials in the URL

    def __str__(self) -> str:
        return self.warm or self.cold


STATES = [
    State("OOM", "OOM", ("CONFIG SET maxmemory 1",), ("CONFIG SET maxmemory 0",), LATER),
    State("NOREPLICAS", "NOREPLICAS", (f"{REPLICAS} 1",), (f"{REPLICAS} 0",), LATER),
    State("BUSY", "BUSY", ("CONFIG SET lua-time-limit 10", "EVAL endless"), ("SCRIPT KILL",), LATER),
    State("max clients", "", ("CONFIG SET maxclients 1",), ("CONFIG SET maxclients 100",), LATER),
    State("is a replica", "", ("REPLICAOF 127.0.0.1 1",), ("REPLICAOF NO ONE",), LATER),
    State(
        "is a replica",
        "",
        (f"{STALE} no", "REPLICAOF 127.0.0.1 1"),
        ("REPLICAOF NO ONE", f"{STALE} yes"),
        LATER,
    ),
    State("NOPERM: EVAL", "", (f"{USER} -eval -evalsha",), (USER,), NOW, WORKER),
    State("NOPERM", "", (f"{USER} resetkeys ~other",), (f"{USER} resetkeys ~*",), NOW, WORKER),
    State("NOPERM", "", (f"{USER} -set",), (USER,), NOW, WORKER),
    State("NOAUTH", "", ("CONFIG SET requirepass sesame",), ("CONFIG SET requirepass ",), NOW),
    State("WRONGPASS", "", (f"{USER} resetpass >other",), (USER,), NOW, WORKER),
    State("has no password", "", (), ("CONFIG SET requirepass sesame",), NOW, ":sesame@"),
]


def execute(client: redis.Redis, *lines: str) -> None:
    """Have a server execute commands; an endless script is begun and left alone."""
    for line in lines:
        if line == "EVAL endless":
            busy = client.connection_pool.make_connection()
            busy.connect()
            busy.send_command("EVAL", "while true do end", "0")
            wait_until(lambda: is_busy(client))
            busy.disconnect()
        else:
            client.execute_command(*line.split(" "))


def is_busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.RedisError as error:
        return "BUSY" in f"{type(error).__name__} {error}".upper()
    return False


@pytest.fixture(scope="module")
def hospital() -> Iterator[Server]:
    """A server for all tests of this file; each test undoes the state that it produced."""
    with Server() as server:
        yield server


@pytest.fixture
def patient(hospital: Server) -> Iterator[redis.Redis]:
    """A client of a server that is about to give errors."""
    hospital.reset()
    with hospital.client() as client:
        yield client
        client.execute_command("ACL", "DELUSER", "worker")


async def refused(flavour: Flavour, manager: LockManager, wait: float = 0, name: str = "a") -> QuorumUnavailableError:
    """Try to take the lock; return the error, which is never that it is taken."""
    with pytest.raises(QuorumUnavailableError) as caught:
        await flavour.acquire(manager.lock(name, wait=wait))
    return caught.value


@pytest.mark.parametrize("state", STATES, ids=str)
async def test_error_is_no_vote_and_is_reported_by_its_code(
    nodes: Servers, hospital: Server, patient: redis.Redis, flavour: Flavour, state: State
):
    """It is no vote and no hold; other nodes work, and so does this one once it is healthy."""
    url = hospital.url.replace("//", f"//{state.login}")
    old, alone, pair, three = (real_manager([url, *nodes.urls[:count]], node_timeout=2.0) for count in (0, 0, 1, 2))
    if state.warm:
        await flavour.release(await flavour.acquire(old.lock("a", wait=0)))
    execute(patient, *state.before)

    for manager, code in ((old, state.warm or state.cold), (alone, state.cold)):
        error = await refused(flavour, manager)
        assert set(error.nodes.values()) == {code}
        assert error.misconfigured is state.at_once
        if state.at_once:
            assert (await refused(flavour, manager, wait=60)).attempts == 1
    both = await refused(flavour, pair)
    assert both.nodes[pair.nodes[0].name] == state.cold
    assert both.misconfigured is state.at_once
    assert await flavour.release(await flavour.acquire(three.lock("a", wait=0))) == "released"
    execute(patient, *state.after)
    assert await flavour.release(await flavour.acquire(old.lock("a", wait=60))) == "released"


@pytest.mark.parametrize("command", ["EVALSHA", "EVAL", "INFO"])
async def test_command_that_a_server_lacks_is_named(flavour: Flavour, command: str):
    """An operator may have renamed it, and finds it by its name; the log of the server says nothing."""
    with Server(args=("--rename-command", command, "")) as server:
        manager = real_manager([server.url])
        if command == "EVALSHA":  # a connection sends each script in full the first time
            await flavour.release(await flavour.acquire(manager.lock("a", wait=0)))

        error = await refused(flavour, manager)

        assert set(error.nodes.values()) == {f"lacks a command that locks need: {command}"}
        await flavour.close(manager)


async def test_half_a_grant_is_taken_back(hospital: Server, patient: redis.Redis, flavour: Flavour):
    """A script that lacks a right may have run half-way, so the release leaves a tombstone."""
    execute(patient, f"{USER} -zadd")
    manager = real_manager([hospital.url.replace("//", f"//{WORKER}")])

    error = await refused(flavour, manager)

    assert set(error.nodes.values()) == {"NOPERM"}
    wait_until(lambda: not patient.exists("t:{a}:h") and patient.keys("t:x:*"))


async def test_full_node_still_executes_releases(hospital: Server, patient: redis.Redis, flavour: Flavour):
    """A holder can release its lock although the node has become full."""
    manager = real_manager([hospital.url])
    lease = await flavour.acquire(manager.lock("a"))
    execute(patient, "CONFIG SET maxmemory 1")
    outcome = await flavour.release(lease)
    execute(patient, "CONFIG SET maxmemory 0")

    assert outcome == ("released" if not patient.exists("t:{a}:h") else "unknown")


@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
@pytest.mark.parametrize("names", ["a", ["a", "b", "c"]], ids=["one", "several"])
async def test_full_node_extends_what_is_held_on_it(
    hospital: Server, patient: redis.Redis, flavour: Flavour, names: str | list[str], shared: bool
):
    """A holder keeps its lock although the node has become full, and nobody else gets one there."""
    manager = real_manager([hospital.url])
    lease = await flavour.acquire(manager.lock(names, ttl=60.0, shared=shared, renew=False))
    keys = [f"t:{{{name}}}:h" for name in names]
    for key in keys:
        patient.pexpire(key, 20_000)
    execute(patient, "CONFIG SET maxmemory 1")

    extended = await flavour.extend(lease)
    error = await refused(flavour, manager, name="another")
    execute(patient, "CONFIG SET maxmemory 0")

    assert extended
    assert all(patient.pttl(key) > 50_000 for key in keys)
    assert set(error.nodes.values()) == {"OOM"}
    assert await flavour.release(lease) == "released"


# Malformed replies


@dataclass
class Babbler:
    """A server that introduces itself like a real one and then answers every request with the same bytes."""

    greeting: bytes
    reply: bytes
    port: int = 0
    heard: bytes = b""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


@contextmanager
def babbler(greeting: bytes, reply: bytes) -> Iterator[Babbler]:
    it = Babbler(greeting, reply)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                while data := self.request.recv(65536):
                    it.heard += data
                    self.request.sendall(it.greeting + b"*0\r\n" if b"INFO" in data else it.reply)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        it.port = server.server_address[1]
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield it
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
@pytest.mark.parametrize("masters", [[], ["10.0.0.1"], ["127.0.0.1"]], ids=["any", "another", "this"])
async def test_password_is_sent_only_to_hosts_that_may_be_the_master(flavour: Flavour, kind: str, masters: list[str]):
    """A sentinel or a member that lies gets the password for its own host, unless MASTERS does not list that."""
    with babbler(b"-ERR no\r\n", b"-ERR no\r\n") as thief:
        port = str(thief.port).encode()
        words = [b"ip", b"127.0.0.1", b"port", port, b"role-reported-time", b"1"]
        reply = b"*6\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
        if kind == "cluster":
            reply = b"+OK\r\n*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%s\r\n" % port
        with babbler(b"", reply) as liar:
            node: dict[str, object] = {"URL": f"redis+cluster://:sesame@127.0.0.1:{liar.port}"}
            if kind == "sentinel":
                guide = f"redis://127.0.0.1:{liar.port}"
                node = {"SENTINELS": [guide], "SERVICE_NAME": "m", "OPTIONS": {"password": "sesame"}}
            about = {"NODES": [{**node, "MASTERS": masters}], "OPTIONS": {"node_timeout": 14.0, "ttl": 60.0}}
            with override_settings(REDLOCK={"default": about}):
                manager = locks["default"]

                error = await refused(flavour, manager)

                await flavour.close(manager)
                locks.reset()

    assert liar.heard.count(b"MASTER" if kind == "sentinel" else b"SLOTS") <= 2  # and not again and again
    assert (b"sesame" in thief.heard) is (masters != ["10.0.0.1"])
    foreign = any("names a master that MASTERS does not list" in said for said in error.nodes.values())
    assert foreign is (masters == ["10.0.0.1"])


# tests/unit/locking/test_wire.py has more of them.
WELL_FORMED = [b"$-1\r\n", b"*1\r\n*1\r\n$-1\r\n", b"*5\r\n$3\r\nYES\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n0\r\n$0\r\n\r\n"]
BROKEN = [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"*x\r\n"]


@pytest.mark.parametrize("reply", [*WELL_FORMED, *BROKEN])
async def test_malformed_reply_is_no_vote(nodes: Servers, flavour: Flavour, reply: bytes):
    """A malformed reply is no grant and no holder; whatever the node did is released, with a tombstone."""
    with nodes[0].client(decode_responses=False) as client:
        text = b"run_id:%s\r\nuptime_in_seconds:1000\r\nrole:master\r\n" % client.info("server")["run_id"].encode()
    with babbler(b"$%d\r\n%s\r\n$-1\r\n" % (len(text), text), reply) as server:
        manager = real_manager([server.url])

        error = await refused(flavour, manager)

        assert set(error.nodes.values()) == {"malformed reply"}
        assert not error.misconfigured
        if reply in WELL_FORMED:
            release = b"$2\r\nt:\r\n$5\r\n10000\r\n"  # with a tombstone for the whole ttl
            await eventually(lambda: release in server.heard)


@pytest.mark.parametrize("greeting", [b"$3\r\nhey\r\n", b"HTTP/1.1 400 Bad Request\r\n"])
async def test_something_else_than_a_node_is_named(flavour: Flavour, greeting: bytes):
    """A server that does not introduce itself as a node gets no request."""
    with babbler(greeting, b"+OK\r\n") as server:
        manager = real_manager([server.url])

        error = await refused(flavour, manager)

        assert set(error.nodes.values()) == {"malformed reply"}
        assert b"t:index" not in server.heard
