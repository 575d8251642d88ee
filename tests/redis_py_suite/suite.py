"""
The pytest plugin that runs redis-py's tests over ``compat.Lock`` and real nodes, and counts the differences.

The tests read the lock's key, which has another name and a longer value here, on every node. Their client reads and
writes our key instead of theirs. Nothing else of redis-py or of the tests is changed.
"""

import os
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator
from itertools import count
from pathlib import Path
from statistics import median_low
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.lock
import redis.client
import redis.lock
from django.conf import settings
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from django_redlock import locks
from django_redlock.testing import Servers

NAME = "foo"  # of the lock, in all of the tests
BRIEF = "not_raise_on_release_lock"  # in the names of the tests whose leases are short
NONCE = 32  # bytes at the beginning of a value that are the secret; the rest describes the holder
WRITES = {"SET", "PEXPIRE"}
READS = {"GET", "TTL", "PTTL"}

differences: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("differences.toml").read_text())
servers = Servers(int(os.environ["SUITE_NODES"]))
prefixes = map("test-{}".format, count())
counts: Counter[str] = Counter()


# The nodes, as a client of one server would see them


def on_nodes(command: str, *args: Any) -> Any:
    """Write a lock's key on all nodes, or return what most of them have there."""
    key = f"{settings.REDLOCK['default']['KEY_PREFIX']}:{{{NAME}}}:h"
    replies = [client.execute_command(command, key, *args) for client in clients()]
    if command == "GET":
        return Counter(reply and reply[:NONCE] for reply in replies).most_common(1)[0][0]
    return replies[0] if command == "SET" else median_low(replies)


def clients() -> Iterator[Redis]:
    """Yield a client for each node."""
    for server in servers:
        with server.client(decode_responses=False) as client:
            yield client


class Client(Redis):
    """A client for which the lock's key is where redis-py's lock would store it."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] in READS | WRITES and args[1] == NAME:
            return on_nodes(args[0], *args[2:])
        return super().execute_command(*args, **options)


class AsyncClient(AsyncRedis):
    """The same for asyncio."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] in READS | WRITES and args[1] == NAME:
            return on_nodes(args[0], *args[2:])
        return await super().execute_command(*args, **options)


def pytest_configure(config: pytest.Config) -> None:
    """Start the nodes, and put our classes where the tests import redis-py's."""
    servers.start()
    settings.configure(INSTALLED_APPS=["django_redlock"])
    use_new_keys()
    from django_redlock.compat import AsyncLock, Lock

    redis.lock.Lock, redis.asyncio.lock.Lock = Lock, AsyncLock
    redis.Redis = redis.client.Redis = Client
    redis.asyncio.Redis = AsyncClient
    config.option.redis_url = config.option.redis_mod_url = servers[0].url


def pytest_unconfigure() -> None:
    servers.stop()


def use_new_keys(node_timeout: float | None = None) -> None:
    """Make the locks use keys of their own, so that a renewed key of an earlier test does not matter."""
    # The guard would mistake the start of the nodes for a restart.
    options = {"restart_guard": False, "node_timeout": node_timeout}
    settings.REDLOCK = {"default": {"NODES": servers.urls, "KEY_PREFIX": next(prefixes), "OPTIONS": options}}
    locks.reset()


@pytest.fixture(autouse=True)
async def apart(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """No lock of another test, and no connection that outlives its event loop."""
    # Nodes have two seconds to answer, except where a lease is a tenth of a second long.
    use_new_keys(None if BRIEF in request.node.name else 2.0)
    yield
    await locks["default"].aclose()


# The tests that must differ, and no others


def test_of(nodeid: str) -> str:
    """Return the name of a test without its parameters and the folder."""
    return nodeid.removeprefix("tests/").partition("[")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fail if a difference is listed for a test that is not in its file."""
    files = {test_of(item.nodeid).partition("::")[0] for item in items}
    listed = {test for test in differences if test.partition("::")[0] in files}
    unknown = listed - {test_of(item.nodeid) for item in items}
    if unknown:
        raise pytest.UsageError(f"differences.toml lists what redis-py has not: {', '.join(sorted(unknown))}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    listed = differences.get(test_of(item.nodeid))
    if call.when == "call" and listed:
        judge(report, call, listed["line"])
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"left out, so that it proves nothing: {report.longrepr}"
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.failed:
        counts["differing" if hasattr(report, "wasxfail") else report.outcome] += 1


def judge(report: pytest.TestReport, call: pytest.CallInfo[None], line: str) -> None:
    """Accept the failure of a listed test only if it is at the listed line."""
    if call.excinfo is None:
        report.outcome, report.longrepr = "failed", "differs no longer: take it out of differences.toml and the docs"
    elif line in str(call.excinfo.traceback[-1].statement):
        report.outcome, report.wasxfail = "skipped", f"differs on purpose: {line}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    said = f"{counts['passed']} passed, {counts['differing']} differ on purpose, {counts['failed']} failed"
    nodes = "1 node" if len(servers) == 1 else f"{len(servers)} nodes"
    terminalreporter.line(f"\nredis-py {redis.__version__}, its tests of Lock and asyncio Lock over {nodes}: {said}.")
