"""
Servers for the tests.

A test that lacks something (a server, a browser) is skipped. With ``REDLOCK_REQUIRE=all``, as in CI, it fails instead.
"""

import inspect
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from django_redlock.engine import rounds, rounds_async
from django_redlock.engine.lease import Lease
from django_redlock.engine.manager import Surroundings
from django_redlock.engine.watchdog import watchdog
from django_redlock.handler import DjangoSurroundings
from django_redlock.runtime import clock
from django_redlock.testing import ServerNotFoundError, Servers, find_server, start_servers
from tests.etcd import Member
from tests.services import (
    Database,
    MariaDB,
    PostgreSQL,
    RabbitMQ,
    Service,
    ServiceMissingError,
    SQLite,
    django_database,
)
from tests.zookeeper import Zoo

pytest_plugins = ["tests.tiers", "tests.managers", "tests.certificates", "tests.shop.fixtures"]

Report = pytest.TestReport | pytest.CollectReport


def needs(thing: str, found: object, remedy: str) -> None:
    """Skip the running test unless *thing* was *found*; *remedy* says what to type."""
    if not found:
        pytest.skip(f"needs {thing}: {remedy}")


def needs_service(name: str, kind: type[Service]) -> None:
    """Skip the running test unless the program of a service is installed."""
    try:
        kind.find()
    except ServiceMissingError as error:
        needs(name, None, str(error))


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Five real servers, shared by all tests of this process; tests normally use ``nodes`` instead."""
    try:
        find_server()
    except ServerNotFoundError as error:
        needs("a server", None, str(error))
    with start_servers(5) as five:
        yield five


@pytest.fixture
def nodes(servers: Servers) -> Iterator[Servers]:
    """Five real servers, all running and empty, whatever the last test did to them."""
    servers.reset()
    yield servers  # a lease that is still renewed afterwards would write to them in the middle of a later test
    theirs = {f"127.0.0.1:{server.port}" for server in servers}
    holds = [tended.hold for tended in watchdog._agenda if isinstance(tended, Lease)]
    renewed = [hold for hold in holds if hold.renewed and not hold.ended]
    left = [hold.names for hold in renewed if theirs & {node.name for node in hold.keeper.nodes}]
    assert not left, f"still renewed: {left}"


@pytest.fixture
def short_turns() -> Iterator[None]:
    """Let threads take turns as often as they can; a busy one otherwise keeps the others waiting for up to a second."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def uncrowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no outcome depend on how busy the machine is; tests of that use processes of their own."""
    monkeypatch.setattr(clock, "LOAD", "/nowhere")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a first round wait for the connections to all nodes: usually it waits for 20 ms after its decision."""
    monkeypatch.setattr(rounds, "GRACE", 1.0)
    monkeypatch.setattr(rounds_async, "GRACE", 1.0)


@pytest.fixture(autouse=True)
def blocking_in_coroutine_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test that is a coroutine act as another client with blocking code; nothing else needs its event loop."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        monkeypatch.setattr(DjangoSurroundings, "blocking", Surroundings.blocking)


def fixtures_of(name: str, kind: type[Service]) -> tuple[Any, Any]:
    """Return a fixture for all tests of this process, and the one that tests use: it runs, and holds nothing."""

    @pytest.fixture(scope="session", name=f"{name}_server")
    def shared() -> Iterator[Service]:
        needs_service(name, kind)
        with kind() as private:
            yield private

    @pytest.fixture(name=name)
    def ready(request: pytest.FixtureRequest) -> Service:
        server: Service = request.getfixturevalue(f"{name}_server").start()
        server.clear()
        return server

    return shared, ready


postgresql_server, postgresql = fixtures_of("postgresql", PostgreSQL)
mariadb_server, mariadb = fixtures_of("mariadb", MariaDB)
rabbitmq_server, rabbitmq = fixtures_of("rabbitmq", RabbitMQ)
etcd_server, etcd = fixtures_of("etcd", Member)
zookeeper_server, zookeeper = fixtures_of("zookeeper", Zoo)


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> SQLite | PostgreSQL | MariaDB:
    """Every kind of database in turn: a file, and two running servers."""
    return SQLite(tmp_path) if request.param == "sqlite" else request.getfixturevalue(request.param)


class Prepared:
    """Databases that the tests of this process share, of each kind one for each way of making its tables."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._names: dict[tuple[str, Callable[[str], None]], str] = {}

    def database(self, engine: SQLite | Database, prepare: Callable[[str], None]) -> str:
        """Return the name of a database; on first use it is created, and *prepare* called with an alias of it."""
        key = (engine.scheme, prepare)
        if key not in self._names:
            self._names[key] = self._stack.enter_context(engine.database())
            with django_database("prepared", engine.settings(self._names[key])):
                prepare("prepared")
        return self._names[key]


@pytest.fixture(scope="session")
def prepared() -> Iterator[Prepared]:
    with ExitStack() as stack:
        yield Prepared(stack)


def pytest_configure() -> None:
    """Restore the usual signal handling, which may be off in the background, and give examples enough time."""
    settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("unhurried")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Report, Report]:
    return fail_if_left_out((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Report, Report]:
    return fail_if_left_out((yield))


def fail_if_left_out(report: Report) -> Report:
    """If everything is required, turn the report of a skipped test or file into a failure."""
    left_out = report.skipped and not hasattr(report, "wasxfail")
    if left_out and os.environ.get("REDLOCK_REQUIRE") == "all":
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"Left out, but REDLOCK_REQUIRE=all. {why}"
        report.outcome = "failed"
    return report
