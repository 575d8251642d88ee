"""Every error reply has one meaning: no vote. Real servers in the real state give each of them."""

import shutil
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass

import pytest
import redis
from django.test import override_settings

from django_redlock import LockManager, QuorumUnavailableError, locks
from django_redlock.core.attempt import Granted
from django_redlock.core.protocol import Raise
from django_redlock.testing import Server, Servers
from tests.clusters import cluster_nodes
from tests.managers import Asyncio, Flavour, eventually, on_each, real_manager, wait_until

USER = "ACL SETUSER worker on >sesame ~* &* +@all"
ENDLESS = "while true do end"


@dataclass
class Patient:
    """A server that is about to give errors, and the credentials to use."""

    server: Server
    client: redis.Redis
    login: str = ""

    @property
    def url(self) -> str:
        return f"redis://{self.login}127.0.0.1:{self.server.port}/0"

    def command(self, line: str) -> object:
        return self.client.execute_command(*line.split())

    def says(self, word: str, *command: str) -> bool:
        """Return whether the server answers a command with this error."""
        try:
            self.client.execute_command(*command)
        except redis.RedisError as error:
            return word in f"{type(error).__name__} {error}"
        return False


# Each of these puts a server into a state, and takes it out again.


def between(before: str, after: str) -> Callable[[Patient], AbstractContextManager[None]]:
    """Return a state that one command produces, and another one ends."""

    @contextmanager
    def state(it: Patient) -> Iterator[None]:
        it.command(before)
        yield
        it.command(after)

    return state


full = between("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0")
too_few_replicas = between("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0")
replica = between("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE")
crowd = between("CONFIG SET maxclients 1", "CONFIG SET maxclients 100")


@contextmanager
def snapshots_fail(it: Patient) -> Iterator[None]:
    shutil.rmtree(it.server._folder)  # even root cannot write there now
    it.client.config_set("save", "3600 1")
    it.client.set("changed", "1")
    with suppress(redis.ResponseError):  # some versions cannot even begin
        it.client.bgsave()
    wait_until(lambda: it.client.info("persistence")["rdb_last_bgsave_status"] == "err")
    yield
    it.server._folder.mkdir()
    it.server.restart()


@contextmanager
def replica_that_lost_its_master(it: Patient) -> Iterator[None]:
    it.client.config_set("replica-serve-stale-data", "no")
    with replica(it):
        yield
    it.client.config_set("replica-serve-stale-data", "yes")


@contextmanager
def long_script(it: Patient) -> Iterator[None]:
    it.client.config_set("lua-time-limit", "10")
    busy = it.client.connection_pool.make_connection()
    busy.connect()
    busy.send_command("EVAL", ENDLESS, "0")
    wait_until(lambda: it.says("BUSY", "PING"))
    yield
    it.client.script_kill()
    busy.disconnect()


@contextmanager
def no_right(it: Patient, less: str) -> Iterator[None]:
    it.login = "worker:sesame@"
    it.command(f"{USER} {less}")
    yield
    it.command(f"{USER} resetkeys ~*")


@contextmanager
def password(it: Patient) -> Iterator[None]:
    it.client.config_set("requirepass", "sesame")
    yield
    it.client.config_set("requirepass", "")


@contextmanager
def another_password(it: Patient) -> Iterator[None]:
    it.login = "worker:sesame@"
    it.command(f"{USER} resetpass >other")
    yield
    it.command(USER)


@contextmanager
def needless_password(it: Patient) -> Iterator[None]:
    it.login = ":sesame@"
    yield
    it.command("CONFIG SET requirepass sesame")


@contextmanager
def loading(it: Patient) -> Iterator[None]:
    it.client.config_set("rdbcompression", "no")
    step = "loading-process-events-interval-bytes"  # the amount loaded between two looks at the connections
    if it.client.config_get(step):
        keys, size, args = 600, 2_000, ("--key-load-delay", "50000", f"--{step}", "1024")  # microseconds
    else:  # Redis 6.2, where this is 2 MB
        keys, size, args = 60, 2_000_000, ("--key-load-delay", "40000")
    for number in range(keys):
        it.client.set(f"key {number}", "x" * size)
    with it.server.client(socket_timeout=30) as client:  # a slow disk takes seconds
        client.shutdown(save=True)
    it.server._wait_until_gone()
    it.server.args = args
    it.server._launch()
    wait_until(lambda: it.says("BusyLoading", "PING"))
    yield
    with suppress(redis.ResponseError):  # Redis 6.2 does not listen; it takes two seconds
        it.client.config_set("key-load-delay", "0")
    it.server._wait_until_ready()
    it.client.flushall()
    it.server.args = ()


NOW, LATER = True, False


@dataclass(frozen=True)
class Case:
    """
    One state of a server.

    Args:
        word: The code in the lock's error for the node.
        state: Produces the state.
        at_once: Whether nobody waits for such a node.
        warm: Whether an earlier connection gets the error, too.
        cold_word: The code for a new connection, if it differs.
    """

    word: str
    state: Callable[[Patient], object]
    at_once: bool = LATER
    warm: bool = True
    cold_word: str = ""

    def __str__(self) -> str:
        return self.word

    def said(self, warm: bool) -> str:
        return self.word if warm else self.cold_word or self.word


CASES = [
    Case("OOM", full),
    Case("MISCONF", snapshots_fail),
    Case("NOREPLICAS", too_few_replicas),
    Case("LOADING", loading, warm=False),
    Case("BUSY", long_script),
    Case("max clients", crowd, warm=False),
    Case("READONLY", replica, NOW, cold_word="is a replica"),
    Case("MASTERDOWN", replica_that_lost_its_master, NOW, cold_word="is a replica"),
    Case("NOPERM", lambda it: no_right(it, "-eval -evalsha"), NOW, warm=False),
    Case("NOPERM", lambda it: no_right(it, "resetkeys ~other"), NOW, warm=False),
    Case("NOPERM", lambda it: no_right(it, "-set"), NOW, warm=False),
    Case("NOAUTH", password, NOW, warm=False),
    Case("WRONGPASS", another_password, NOW, warm=False),
    Case("has no password", needless_password, NOW, warm=False),
]


@pytest.fixture(scope="module")
def hospital() -> Iterator[Server]:
    """A server for all tests of this file; each test undoes the state that it produced."""
    with Server() as server:
        yield server


@pytest.fixture
def patient(hospital: Server) -> Iterator[Patient]:
    hospital.reset()
    with hospital.client() as client:
        yield Patient(hospital, client)
        client.execute_command("ACL", "DELUSER", "worker")


async def refused(flavour: Flavour, manager: LockManager, wait: float = 0) -> QuorumUnavailableError:
    """Try to take the lock; return the error, which is never that it is taken."""
    with pytest.raises(QuorumUnavailableError) as caught:
        await flavour.acquire(manager.lock("a", wait=wait))
    return caught.value


WITH_NEW_CONNECTION = [(case, False) for case in CASES]
WITH_OLD_CONNECTION = [(case, True) for case in CASES if case.warm]


@pytest.mark.parametrize(("case", "warm"), WITH_NEW_CONNECTION + WITH_OLD_CONNECTION, ids=str)
async def test_error_is_no_vote_and_is_reported_by_its_code(
    nodes: Servers, patient: Patient, flavour: Flavour, case: Case, warm: bool
):
    """It is no vote and no hold; other nodes work, and so does this one once it is healthy."""
    with ExitStack() as stack:
        if warm:
            alone = real_manager([patient.url], node_timeout=2.0)
            await flavour.release(await flavour.acquire(alone.lock("a", wait=0)))
        state = stack.enter_context(ExitStack())
        state.enter_context(case.state(patient))
        if not warm:
            alone = real_manager([patient.url], node_timeout=2.0)
        pair, three = (real_manager([patient.url, *nodes.urls[:count]], node_timeout=2.0) for count in (1, 2))

        error = await refused(flavour, alone)
        both = await refused(flavour, pair)
        lease = await flavour.acquire(three.lock("a", wait=0))

        assert set(error.nodes.values()) == {case.said(warm)}
        assert both.nodes[pair.nodes[0].name] == case.said(False)
        assert await flavour.release(lease) == "released"
        assert error.misconfigured is both.misconfigured is case.at_once
        if case.at_once:
            assert (await refused(flavour, alone, wait=60)).attempts == 1
        state.close()
        again = await flavour.acquire(alone.lock("a", wait=60))
        assert await flavour.release(again) == "released"


async def test_half_a_grant_is_taken_back(patient: Patient, flavour: Flavour):
    """A script that lacks a right may have run half-way, so the release leaves a tombstone."""
    with no_right(patient, "-zadd"):
        manager = real_manager([patient.url])

        error = await refused(flavour, manager)

        assert set(error.nodes.values()) == {"NOPERM"}
        wait_until(lambda: not patient.client.exists("t:{a}:h") and patient.client.keys("t:x:*"))


async def test_full_node_still_executes_releases(patient: Patient, flavour: Flavour):
    """A holder can release its lock although the node has become full."""
    manager = real_manager([patient.url])
    lease = await flavour.acquire(manager.lock("a"))
    with full(patient):
        outcome = await flavour.release(lease)

    assert outcome == ("released" if not patient.client.exists("t:{a}:h") else "unknown")


async def test_scripts_forgotten_between_the_two_rounds_are_sent_again(nodes: Servers, flavour: Flavour):
    """SCRIPT FLUSH between the grant and the raise of the token costs a message, not the lock."""
    manager = real_manager(nodes.urls)
    await flavour.release(await flavour.acquire(manager.lock("a")))
    on_each(nodes, "SET", "t:{a}:f", str(2**52))
    ask = manager.aask if isinstance(flavour, Asyncio) else None
    for flushes in range(2):
        steps = manager.acquirer.acquisition(manager.lock("a").description().wanted).steps(manager.runtime.instant())
        round, outcome = next(steps), None
        while outcome is None:
            if isinstance(next(iter(round.requests.values())), Raise) and flushes:
                on_each(nodes, "SCRIPT", "FLUSH")
            await ask(round) if ask else manager.ask(round)
            try:
                round = steps.send(manager.runtime.instant())
            except StopIteration as stop:
                outcome = stop.value
        assert isinstance(outcome, Granted)
        assert outcome.fencing_token > 2**52
        manager.release("a", outcome.secret)
        manager.acquirer._highest._highest.clear()  # so that the next proposal is too low again


# Redis Cluster


async def test_cluster_is_a_configuration_error(flavour: Flavour):
    """The keys of a lock are in several slots, and a cluster forgets; no caller waits for a cluster."""
    with cluster_nodes(1) as (server,), server.client() as client:
        mute = silenced(client, server)
        for url, words in ((server.url, {"runs in cluster mode"}), (mute, {"CLUSTERDOWN", "CROSSSLOT"})):
            manager = real_manager([url])

            error = await refused(flavour, manager, wait=60)

            assert set(error.nodes.values()) <= words
            assert (error.misconfigured, error.attempts) == (True, 1)


def silenced(client: redis.Redis, server: Server) -> str:
    """Return the URL of a user that may not read the server's INFO."""
    client.execute_command(*f"{USER} -info".split())
    return server.url.replace("//", "//worker:sesame@")


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
        yield it
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
            with override_settings(REDLOCK={"default": {"NODES": [{**node, "MASTERS": masters}]}}):
                manager = locks["default"]

                error = await refused(flavour, manager)

                await flavour.close(manager)
                locks.reset()

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


async def test_node_that_refuses_info_has_no_vote_while_restarts_are_guarded(patient: Patient, flavour: Flavour):
    """Without INFO nobody knows when a node started; a right is missing, and waiting does not help."""
    with no_right(patient, "-info"):
        guarded, careless = (real_manager([patient.url], restart_guard=guard) for guard in (True, False))

        error = await refused(flavour, guarded, wait=60)

        assert set(error.nodes.values()) == {"refuses INFO (NOPERM)"}
        assert (error.misconfigured, error.attempts) == (True, 1)
        await flavour.release(await flavour.acquire(careless.lock("a", wait=0)))
