"""The served key: since when a server has served the locks of a prefix, which every process sees."""

import time
from collections.abc import Callable, Iterator

import pytest
import redis

from django_redlock import LockManager, QuorumUnavailableError
from django_redlock.core.admission import Admission, Greeting
from django_redlock.core.node_state import NodeState
from django_redlock.core.protocol import Kind, Reply
from django_redlock.core.rules import Rules
from django_redlock.nodes import NodeSpec
from django_redlock.nodes.backends import open_node
from django_redlock.nodes.base import LinkError
from django_redlock.testing import Server
from tests.clusters import WEEK, served
from tests.managers import Flavour, real_manager, wait_until

from .test_replies import babbler

REPLICATES_AT_ONCE = ("--repl-diskless-sync-delay", "0")
TTL = 3.0  # seconds; the guard time is a little longer


def guarded(urls: list[str], **options: object) -> LockManager:
    """Return a manager as in a fresh process: it knows nothing of the nodes."""
    numbers = {"ttl": TTL, "max_ttl": TTL, "renew": False, "restart_guard": True, "node_timeout": 0.5, **options}
    return real_manager(urls, **numbers)


def replicate(replica: Server, master: str) -> None:
    """Let a server copy all data of another one, and return when it has."""
    with replica.client() as client:
        client.replicaof(*master.removeprefix("redis://").removesuffix("/0").split(":"))
        wait_until(lambda: client.info("replication")["master_link_status"] == "up")


def greeting(server: Server) -> Greeting:
    """Return what a new connection learns about a server."""
    link = open_node(NodeSpec(server.url), "t:").connect(1.0)
    link.close()
    return link.greeting


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(args=REPLICATES_AT_ONCE) as one:
        yield one


@pytest.fixture
def client(server: Server) -> Iterator[redis.Redis]:
    with server.client() as one:
        yield one


async def test_server_that_is_new_to_the_locks_votes_after_the_guard_time_for_everybody(
    server: Server, client: redis.Redis, flavour: Flavour
):
    """A server that has been running for long may have been emptied; the time counts from the first connection."""
    first, second = guarded([server.url]), guarded([server.url])
    with pytest.raises(
        QuorumUnavailableError, match=r"is new to these locks, votes again in .*\. A quorum will vote in \d s\.$"
    ):
        await flavour.acquire(first.lock("a", wait=0))
    age = greeting(server).age
    served(client)

    lease = await flavour.acquire(second.lock("a", wait=0))

    assert age is not None
    assert age < 30.0
    assert await flavour.release(lease) == "released"


def test_key_names_the_server_and_never_expires(server: Server, client: redis.Redis):
    """The key holds the run id, the replication id and the time of the first connection, and does not change."""
    greeting(server)
    written = client.get("t:served")
    ids, since = written.split(" ")

    again = greeting(server)

    assert ids == f"{client.info('server')['run_id']}/{client.info('replication')['master_replid']}"
    assert abs(int(since) / 1e6 - time.time()) < 30.0
    assert client.get("t:served") == written
    assert client.pttl("t:served") == -1
    assert again.age is not None
    assert again.age > 0.0


def flushed(server: Server, client: redis.Redis) -> None:
    client.flushall()


def restarted_with_data(server: Server, client: redis.Redis) -> None:
    client.save()
    server.kill()
    server.start()


def restarted_without_data(server: Server, client: redis.Redis) -> None:
    server.kill()
    server.start()


@pytest.mark.parametrize("lose", [flushed, restarted_with_data, restarted_without_data], ids=lambda lose: lose.__name__)
def test_age_begins_anew_when_locks_may_be_lost(
    server: Server, client: redis.Redis, lose: Callable[[Server, redis.Redis], None]
):
    """Whatever happened, the first connection to notice it starts the time for all."""
    served(client)
    assert greeting(server).age > WEEK - 1

    lose(server, client)

    assert greeting(server).age < 30.0


def test_each_time_as_a_replica_makes_another_server(server: Server, client: redis.Redis):
    """Its run id is unchanged, but its data is not: its age begins anew, and processes that knew it see that."""
    served(client)
    said = [greeting(server)]
    for _ in range(2):
        with Server(args=REPLICATES_AT_ONCE) as other, other.client() as there:
            replicate(other, server.url)
            there.replicaof("NO", "ONE")
            replicate(server, other.url)
            client.replicaof("NO", "ONE")
        said.append(greeting(server))

    assert [one.age < 30.0 for one in said] == [False, True, True]
    assert len({one.run_id for one in said}) == 1
    assert len({one.promoted for one in said}) == 3
    assert [bool(one.promoted) for one in said] == [False, True, True]


def test_master_that_lost_its_replicas_keeps_its_age(server: Server, client: redis.Redis):
    """A master without replicas gets another replication id after a while, and has lost nothing."""
    client.config_set("repl-backlog-ttl", "1")
    with Server(args=REPLICATES_AT_ONCE) as replica:
        replicate(replica, server.url)
        ids = served(client)
    wait_until(lambda: client.info("replication")["master_replid"] not in ids)

    age = greeting(server).age

    assert age == pytest.approx(WEEK, abs=60.0)
    assert client.info("replication")["master_replid"] in client.get("t:served")


JUNK = ["", "a/b ", "a/b x", "a/b -5", "a/b 1e3", f"a/b {10**17}", "a/b 1 2", "\x00\xff"]


def test_junk_under_the_key_is_replaced(server: Server, client: redis.Redis):
    """Anybody may write the key; what is not a record of this server counts as missing."""
    for junk in [*JUNK, None]:
        ids = served(client)
        if junk is None:
            client.delete("t:served")
            client.rpush("t:served", "of another type")
        else:
            client.set("t:served", junk.replace("a/b", ids))

        assert greeting(server).age == 0.0, junk
        assert client.get("t:served").startswith(f"{ids} ")


def test_node_in_memory_agrees_with_the_script(server: Server, client: redis.Redis):
    """The simulation uses the node in memory, locks use the script: both treat every record in the same way."""
    ids = served(client)
    run, replication = ids.split("/")
    for about in (ids, f"other/{replication}", f"{run}/other", "other/other"):
        for since in (-5.0, 0.0, 5.0, WEEK):
            seconds, micros = client.time()
            now = seconds + micros / 1e6
            served(client, ids=about, since=int((now - since) * 1e6))
            store = NodeState(lambda now=now: now)
            store.records.served = (*about.split("/"), int((now - since) * 1e6))

            theirs = greeting(server).age

            assert theirs == pytest.approx(store.serve(run, replication), abs=4.0), (about, since)


def test_full_node_can_tell_one_memory_from_another(server: Server, client: redis.Redis):
    """It has kept its data and its age; and when it is emptied, everybody sees that, although it is full."""
    served(client)
    client.config_set("maxmemory", "1")
    assert greeting(server).age > WEEK - 1

    client.flushall()

    assert greeting(server).age == 0.0
    assert greeting(server).mark == client.get("t:served")


def test_age_begins_anew_after_keys_were_evicted(server: Server, client: redis.Redis):
    """When the server may not evict any more: until then it has no vote, or need not have kept its data."""
    served(client)
    client.config_set("maxmemory-policy", "volatile-ttl")
    for number in range(1000):
        client.set(f"other:{number}", "x" * 1000, ex=1000)  # only such keys are evicted
    client.config_set("maxmemory", str(client.info("memory")["used_memory"] - 500_000))
    client.set("other", "")
    assert client.info("stats")["evicted_keys"] > 0
    served(client)
    assert greeting(server).age > WEEK - 1

    client.config_set("maxmemory-policy", "noeviction")

    assert greeting(server).age < 30.0
    for policy in ("volatile-ttl", "noeviction"):  # which evicts no more
        client.config_set("maxmemory", "0")
        client.config_set("maxmemory-policy", policy)
        before = client.get("t:served")
        client.config_resetstat()
        assert greeting(server).mark == before == client.get("t:served")


def test_memory_that_comes_back_is_not_known_any_more():
    """After SWAPDB, and again, the first memory lacks the locks that were taken meanwhile."""
    now = [1000.0]
    watch = Admission(Rules(3, restart_guard=True), ("a", "b", "c"), lambda: now[0], lambda: 1e9)
    watch.greet(0, Greeting("r1", age=WEEK, mark="a"))
    assert watch.objection(0) == ""
    watch.greet(0, Greeting("r1", age=0.0, mark="b"))
    assert "was emptied" in watch.objection(0)
    now[0] += 100.0
    watch.judge(0, Reply(Kind.GRANTED, time=1), now[0])
    watch.greet(0, Greeting("r1", age=100.0, mark="b"))
    assert watch.objection(0) == ""

    watch.greet(0, Greeting("r1", age=WEEK + 100.0, mark="a"))

    assert "was emptied" in watch.objection(0)


def test_greeting_that_is_read_late_says_nothing_about_the_memory():
    """A reply may lie unread until the next lock; the server seems younger in it than it is."""
    now = [1000.0]
    watch = Admission(Rules(3, restart_guard=True), ("a", "b", "c"), lambda: now[0], lambda: 1e9)
    for late in (5.0, 0.0):
        now[0] += 10.0
        watch.greet(0, Greeting("r1", age=WEEK + now[0] - late, mark="a"))

        assert watch.objection(0) == ""


def test_error_in_the_place_of_an_age_says_nothing_about_the_memory():
    """A process that has known the server for long goes on, also when the server can say its age again."""
    now = [1000.0]
    watch = Admission(Rules(3, restart_guard=True), ("a", "b", "c"), lambda: now[0], lambda: 1e9)
    for age, mark in ((WEEK, "a"), (None, ""), (WEEK + 200.0, "a")):
        watch.greet(0, Greeting("r1", age=age, mark=mark))
        assert watch.objection(0) == ""
        now[0] += 100.0


def test_server_without_an_age_votes_when_it_has_been_known_for_the_guard_time():
    """Each connection finds the same server; if the time began anew with each, the server would never vote."""
    now = [1000.0]
    watch = Admission(Rules(3), ("a", "b", "c"), lambda: now[0], lambda: 1e9)
    for _ in range(3):
        watch.greet(0, Greeting("r1", age=None))
        now[0] += 25.0
    assert watch.objection(0) == ""

    watch.greet(0, Greeting("r2", age=None))

    assert "votes again in" in watch.objection(0)


INFO = b"run_id:abc\r\nrole:master\r\n"


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize(
    ("said", "age"),
    [
        (bulk(b"SERVED abc 5000000 abc/def 1"), 5.0),
        (bulk(b"SERVED abc 5000000 " + b"m" * 1000), None),
        (bulk(b"SERVED abc -5 abc/def 1"), None),
        (bulk(b"SERVED abc 9007199254740992 abc/def 1"), None),
        (bulk(b"SERVED abc 1e300 abc/def 1"), None),
        (bulk(b"OTHER abc 5 abc/def 1"), None),
        (bulk("SERVED abc ٣ abc/def 1".encode()), None),
        (b"*0\r\n", None),
        (b"-ERR unknown command\r\n", None),
    ],
)
def test_age_is_bounded_where_it_is_read(said: bytes, age: float | None):
    """A number from a node is not taken on trust."""
    with babbler(bulk(INFO) + said, b"") as server:
        link = open_node(NodeSpec(server.url), "t:").connect(5.0)
        link.close()

    assert link.greeting.age == age


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (bulk(b"SERVED def 5000000 def/abc 1"), "answers as two servers"),
        (b"-LOADING the dataset in memory\r\n", "LOADING"),
    ],
)
def test_server_that_does_not_serve_the_locks_itself_yet_is_no_node(said: bytes, why: str):
    """An endpoint may send the commands of one connection to several servers, and a server may load its data."""
    with babbler(bulk(INFO) + said, b"") as server:
        with pytest.raises(LinkError, match=why):
            open_node(NodeSpec(server.url), "t:").connect(5.0)
