"""
What a lock writes to its nodes, key by key, compared with a recorded list.

Other versions of this package, and people with ``redis-cli``, read these keys. A difference here is a change of the
format: processes of two versions could then hold the same lock.
"""

import asyncio
import json
import re
from typing import Any

import pytest

from django_redlock.core.names import SECRET_SIZE
from django_redlock.core.node_state.records import Records
from django_redlock.core.protocol import SHARED, Release
from django_redlock.core.round import cleanup
from django_redlock.engine.manager import LockManager
from django_redlock.nodes.memory import MemoryNode
from django_redlock.testing import Server, Servers
from tests.managers import eventually, real_manager, rules

Keys = dict[str, tuple[Any, bool]]
"""What is under each key, and whether the key expires."""

OWNER = {
    **{"host": "<host>", "pid": "<pid>", "kind": "manual", "label": "invoices", "ref": ""},
    **{"ttl": 60.0, "process": "<process>", "since": "<time>"},
}
SHARED_OWNER = {"host": "", "pid": "<pid>", "kind": "shared", "label": "", "ref": "", "ttl": 60.0, "since": "<time>"}
FENCE = ("<token>", True)

FREE: Keys = {}
HELD: Keys = {
    "{report}:h": (["<secret>", OWNER], True),
    "{report}:f": FENCE,
    "index": (["{report}"], True),
}
EXTENDED: Keys = {**HELD, "{report}:h": (["<secret>", {**OWNER, "extensions": 1}], True)}
WAITED_FOR: Keys = {**EXTENDED, "{report}:q": (["<waiter>"], True), "{report}:s": (["<waiter>"], True)}
PASSED_ON: Keys = {**HELD, "{report}:q": (["<waiter>"], True), "{report}:s": (["<waiter>"], True)}
RELEASED: Keys = {"{report}:f": FENCE}
SHARING: Keys = {
    "{catalogue}:h": ([SHARED, SHARED_OWNER], True),
    "{catalogue}:f": FENCE,
    "{catalogue}:r": (["<secret>", "<secret>"], True),
    "index": (["{catalogue}"], True),
}
SLOT: Keys = {
    "{pool}#1:h": (["<secret>", OWNER], True),
    "{pool}#1:f": FENCE,
    "{pool}#2:h": (["<secret>", OWNER], True),
    "{pool}#2:f": FENCE,
    "index": (["{pool}#1", "{pool}#2"], True),
}


def comparable(value: str) -> Any:
    """Return the value of a key without what differs from run to run."""
    if re.fullmatch(r"\d{16}", value):
        return "<token>"
    found = re.fullmatch(rf"([0-9a-f]{{32}}|{SHARED})({{.*}})?", value)
    if found is None:
        return "<waiter>" if re.fullmatch(r"[^|]+\|\d+", value) else value
    secret = found[1] if found[1] == SHARED else "<secret>"
    if found[2] is None:
        return secret
    about = json.loads(found[2])
    about |= {"pid": "<pid>", "since": "<time>"}
    about |= {field: f"<{field}>" for field in ("host", "process") if about.get(field)}
    return [secret, about]


def key_name(key: str) -> str:
    return f"x:{comparable(key[2:])}" if key.startswith("x:") and len(key) == 2 + SECRET_SIZE else key


def on_server(server: Server, prefix: str) -> Keys:
    """Return the keys of a real server."""
    found: Keys = {}
    with server.client() as client:
        for key in client.scan_iter(f"{prefix}*"):
            members = client.type(key) == "zset"
            value = sorted(map(comparable, client.zrange(key, 0, -1))) if members else comparable(client.get(key))
            found[key_name(key.removeprefix(prefix))] = (value, client.pttl(key) > 0)
    found.pop("served", None)  # what the server itself leaves there when a client connects
    return found


def in_memory(records: Records, now: float) -> Keys:
    """Return what a node in memory stores, under the keys of a real one."""
    found: Keys = {}
    for slug, (value, until) in records.holders.items():
        found[f"{slug}:h"] = (comparable(value), until is not None)
    for slug, (number, until) in records.fences.items():
        found[f"{slug}:f"] = (comparable(str(number)), until is not None)
    for slug in [slug for slug in records.shared if records.holder(slug, now)]:
        if secrets := records.sharers(slug, now):
            found[f"{slug}:r"] = (sorted(map(comparable, secrets)), True)
    for slug, queue in records.queues.items():
        if queue.stamps:
            found[f"{slug}:q"] = (sorted(map(comparable, queue.stamps)), True)
            found[f"{slug}:s"] = (sorted(map(comparable, queue.enrolled)), True)
    for secret, tombstone in records.tombstones.items():
        found[f"x:{comparable(secret)}"] = ("stop" if tombstone.revoked else "1", True)
    if records.index:
        found["index"] = (sorted(records.index), True)
    return found


@pytest.fixture(params=["memory", "server"])
def one(request: pytest.FixtureRequest) -> Any:
    """A manager over one node, and what reads the node's keys: in memory, and on a server."""
    if request.param == "memory":
        node = MemoryNode("only")
        yield LockManager([node], rules(1, ttl=60.0)), lambda: in_memory(node.store.records, node.store.now())
        return
    nodes: Servers = request.getfixturevalue("nodes")
    manager = real_manager(nodes.urls[:1], prefix="app:", ttl=60.0)
    yield manager, lambda: on_server(nodes[0], "app:")
    manager.close()


async def test_lock_writes_what_it_has_always_written(one: Any):
    """Each step of a hold leaves the recorded keys: held, extended, waited for, passed on, released."""
    manager, keys = one
    assert keys() == FREE
    lease = await manager.lock("report", label="invoices", renew=True).aacquire()
    assert keys() == HELD
    assert await lease.aextend()
    assert keys() == EXTENDED
    waiter = asyncio.create_task(manager.lock("report", label="invoices", wait=60).aacquire())
    await eventually(lambda: "{report}:q" in keys())
    assert keys() == WAITED_FOR
    await lease.arelease()
    lease = await waiter
    assert keys() == PASSED_ON
    await lease.arelease()
    assert keys() == RELEASED
    await manager.aclose()


def test_other_locks_write_what_they_have_always_written(one: Any):
    """So do shared holders, the slots of a lock with ``limit=``, and the tombstones of releases and revocations."""
    manager, keys = one
    both = [manager.lock("catalogue", shared=True).acquire() for _ in range(2)]
    assert keys() == SHARING
    for lease in both:
        lease.release()
    assert keys() == {"{catalogue}:f": FENCE}
    slots = [manager.lock("pool", limit=2, label="invoices").acquire() for _ in range(2)]
    assert keys() == {**SLOT, "{catalogue}:f": FENCE}
    for lease in slots:
        lease.release()
    before = keys()
    for revoke, written in ((False, "1"), (True, "stop")):
        release = Release(("{report}",), "a" * SECRET_SIZE, revoke=revoke)
        manager.ask(cleanup(release, nodes := [0], unsure=nodes, tombstone=60.0, timeout=10.0))
        assert keys() == {**before, "x:<secret>": (written, True)}
