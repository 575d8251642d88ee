"""A fresh process whose nodes are far away."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from django_redlock.testing import FaultProxy, Servers

from .conftest import Live, outcome

FIRST = """
import asyncio
from django_redlock import lock

async def in_a_loop():
    async with lock("b", wait=0):
        print("asyncio")

with lock("a", wait=0):
    print("blocking")
asyncio.run(in_a_loop())
"""

NIGHTLY = ("nightly", "--", "echo", "done")


@pytest.fixture
def distant(live: Live, nodes: Servers, size: int, way: float) -> Iterator[Live]:
    """Processes with the default options, and nodes with a user and a database that are *way* seconds away and back."""
    with ExitStack() as stack:
        urls = []
        for server in nodes[:size]:
            client = stack.enter_context(server.client())
            client.acl_setuser("far", enabled=True, passwords=["+there"], keys="*", channels="*", commands=["+@all"])
            stack.callback(client.acl_deluser, "far")
            proxy = stack.enter_context(FaultProxy(server.url))
            proxy.delay(way / 2)
            urls.append(f"redis://far:there@127.0.0.1:{proxy.port}/3")
        live.env |= {"LIVE_NODES": ",".join(urls), "LIVE_DEFAULTS": "yes"}
        yield live


# In both, a link and a request together take longer than the node timeout.
@pytest.mark.parametrize(("size", "way"), [(1, 0.6), (3, 0.2)])
def test_fresh_process_takes_a_lock_at_once(distant: Live):
    """The first attempt of a process waits for its connections as well."""
    found: list[object] = []
    for _ in range(5):  # a pause of the machine at the wrong moment is longer than the nodes have
        found.append((outcome(distant.python("-c", FIRST)), outcome(distant.manage("redlock_run", *NIGHTLY))[::2]))
        if found[-1] == (("blocking\nasyncio", "", 0), ("done", 0)):
            break
    else:
        pytest.fail(f"never at once: {found}")
