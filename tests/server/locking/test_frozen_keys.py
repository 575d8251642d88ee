"""
What a lock writes to its nodes, key by key, compared with the files in tests/frozen.

Other versions of this package, and people with ``redis-cli``, read these keys. A difference here is a change of the
format: processes of two versions could then hold the same lock.
"""

import asyncio
import re
from collections.abc import Iterable
from typing import Any

import pytest

from django_redlock import LockManager
from django_redlock.core.names import SECRET_SIZE
from django_redlock.core.node_state.records import Records
from django_redlock.core.protocol import SHARED, Release
from django_redlock.core.round import Round
from django_redlock.nodes.memory import MemoryNode
from django_redlock.testing import Server, Servers
from tests.frozen import FOLDER, compare, text_of
from tests.managers import eventually, real_manager, rules

Keys = list[str]
"""The keys of a node, what is under each of them, and whether it expires."""

RULES = """
Processes of two versions meet on the same nodes: what a version before the next major one cannot read or does not
write lets both of them hold the same lock. Leave the records as they are. A field may be added to the JSON if older
versions ignore it; then say so in CHANGELOG.md.
"""
VARYING = [
    (rf"^(?!{SHARED})[0-9a-f]{{32}}", "<secret>"),
    (r"^\d{16}$", "<token>"),
    (r"^[^|{]+\|\d+(?=\||$)", "<waiter>"),
    (r'"(host|process)":"[^"]+"', r'"\1":"<\1>"'),
    (r'"pid":\d+', '"pid":<pid>'),
    (r'"since":[\d.]+', '"since":<seconds>'),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "<task>"),
]


def comparable(value: str) -> str:
    """Return a text without what differs from run to run."""
    for varying, instead in VARYING:
        value = re.sub(varying, instead, value)
    return value


def line(key: str, value: str | Iterable[str], expires: bool) -> str:
    """Return a key of the file: the text under it, or the members of a sorted set."""
    key = re.sub("^x:[0-9a-f]{32}$", "x:<secret>", key)
    shown = comparable(value) if isinstance(value, str) else f"[{', '.join(sorted(map(comparable, value)))}]"
    return f"{key}  {shown}  {'expires' if expires else 'stays'}"


def on_server(server: Server, prefix: str) -> Keys:
    """Return the keys of a real server."""
    found = []
    with server.client() as client:
        # What the server itself leaves under "served" when a client connects is not compared.
        for key in {*client.scan_iter(f"{prefix}*")} - {f"{prefix}served"}:
            members = client.type(key) == "zset"
            value = (
                [scored(*each) for each in client.zrange(key, 0, -1, withscores=True)] if members else client.get(key)
            )
            found.append(line(key.removeprefix(prefix), value, client.pttl(key) > 0))
    return sorted(found)


def scored(each: str, score: float) -> str:
    """Return a member of a sorted set with the unit of its score, which is a time of now."""
    return f"{comparable(each)} at <{'milliseconds' if score < 10**14 else 'microseconds'}>"


def in_memory(records: Records, now: float) -> Keys:
    """Return what a node in memory stores, under the keys of a real one; there, sorted sets have scores as well."""
    found = [line(f"{slug}:h", value, until is not None) for slug, (value, until) in records.holders.items()]
    found += [line(f"{slug}:f", str(number), until is not None) for slug, (number, until) in records.fences.items()]
    for slug in [slug for slug in records.shared if records.holder(slug, now)]:
        if secrets := records.sharers(slug, now):
            found.append(line(f"{slug}:r", secrets, True))
    for slug, queue in records.queues.items():
        if queue.stamps:
            found += [line(f"{slug}:q", queue.stamps, True), line(f"{slug}:s", queue.enrolled, True)]
    for secret, tombstone in records.tombstones.items():
        found.append(line(f"x:{secret}", "stop" if tombstone.revoked else "1", True))
    if records.index:
        found.append(line("index", records.index, True))
    return sorted(found)


def check(steps: dict[str, Keys], name: str, on_server: bool) -> None:
    """Compare each step with the file; a node in memory with the same text, without the scores."""
    if on_server:
        compare(name, steps, RULES)
    else:
        frozen = (FOLDER / name).read_text("utf-8")
        assert text_of(steps) == re.sub(r" at <\w+>", "", frozen)


@pytest.fixture(params=["memory", "server"])
def one(request: pytest.FixtureRequest) -> Any:
    """A manager over one node, what reads the node's keys, and whether it is on a server or in memory."""
    if request.param == "memory":
        node = MemoryNode("only")
        yield LockManager([node], rules(1, ttl=60.0)), lambda: in_memory(node.store.records, node.store.now()), False
        return
    nodes: Servers = request.getfixturevalue("nodes")
    yield real_manager(nodes.urls[:1], prefix="app:", ttl=60.0), lambda: on_server(nodes[0], "app:"), True


async def test_lock_writes_what_it_has_always_written(one: Any):
    """Each step of a hold leaves the recorded keys: held, extended, waited for, passed on, released."""
    manager, keys, on_server = one
    steps = {"before": keys()}
    lease = await manager.lock("report", label="invoices", renew=True).aacquire()
    steps["held"] = keys()
    assert await lease.aextend()
    steps["extended"] = keys()
    waiter = asyncio.create_task(manager.lock("report", label="invoices", wait=60).aacquire())
    await eventually(lambda: any(key.startswith("{report}:q") for key in keys()))
    steps["waited for"] = keys()
    await lease.arelease()
    lease = await waiter
    steps["passed on to the waiter"] = keys()
    await lease.arelease()
    steps["released"] = keys()
    await manager.aclose()

    check(steps, "lock.txt", on_server)


def test_other_locks_write_what_they_have_always_written(one: Any):
    """So do shared holders, the slots of a lock with ``limit=``, and the tombstones of releases and revocations."""
    manager, keys, on_server = one
    both = [manager.lock("catalogue", shared=True).acquire() for _ in range(2)]
    steps = {"shared by two": keys()}
    for lease in both:
        lease.release()
    steps["released by both"] = keys()
    slots = [manager.lock("pool", limit=2, label="invoices").acquire() for _ in range(2)]
    steps["two permits"] = keys()
    for lease in slots:
        lease.release()
    for revoke, step in ((False, "tombstone"), (True, "asked to stop")):
        release = Release(("{report}",), "a" * SECRET_SIZE, revoke=revoke)
        manager.driver.ask(Round.to_release(release, nodes := [0], 10.0, unsure=nodes, tombstone=60.0, lasting=60.0))
        steps[step] = keys()

    check(steps, "other-locks.txt", on_server)
