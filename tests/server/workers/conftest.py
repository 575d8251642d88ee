"""
Real workers over real servers.

Leases are short where a lease must run out, and long where something must happen before it could. What takes its time
(a lease that ends, a limit, a countdown) is begun by a fixture of the module, and looked at by one of its last tests.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from django.test import override_settings
from kombu import pools

from django_redlock.testing import Server, Servers
from django_redlock.testing.servers import spawn
from tests.managers import wait_until

from . import project, worker_settings


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have one process run all tests that share workers; those over RabbitMQ are where the RabbitMQ is."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.callspec.params["broker"] == "redis":
            item.add_marker(pytest.mark.xdist_group("pools" if item.path.stem == "test_pools" else "workers"))


@pytest.fixture(scope="session")
def results() -> Iterator[Server]:
    """Where results are kept, and what tests and tasks tell each other; also the broker, as a rule."""
    with Server() as server:
        project.configure(server.url, server.url)
        yield server
        project.app.backend.result_consumer.stop()
        project.app.backend.result_consumer._pubsub = None  # or results that are collected later talk to it
        project.app.backend.client.close()
        hang_up()


@pytest.fixture(scope="package", params=["redis", pytest.param("rabbitmq", marks=pytest.mark.endurance)])
def broker(request: pytest.FixtureRequest, results: Server) -> Iterator[str]:
    """The URL of the tests' broker. RabbitMQ matters to those that say so; the others run on it in the long tiers."""
    url = results.url if request.param == "redis" else request.getfixturevalue("rabbitmq_server").start().url
    project.configure(url, results.url)
    yield url
    hang_up()


def hang_up() -> None:
    """Close all connections to the broker; the next test may have another."""
    project.app._after_fork()
    pools.reset()


@pytest.fixture(scope="module", autouse=True)
def nodes_of_workers(servers: Servers) -> Iterator[None]:
    servers.reset()
    with override_settings(REDLOCK=worker_settings.redlock(",".join(servers.urls))):
        yield


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture(scope="package")
def surroundings(broker: str, results: Server, servers: Servers) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "DJANGO_SETTINGS_MODULE": "tests.server.workers.worker_settings",
        "TEST_BROKER": broker,
        "TEST_RESULTS": results.url,
        "TEST_NODES": ",".join(servers.urls),
    }


@pytest.fixture(scope="package")
def start(surroundings: dict[str, str]) -> Iterator[Start]:
    """Start a worker for a queue, and return at once: messages wait until it is ready."""
    workers: list[subprocess.Popen[bytes]] = []

    def start(queue: str, *, pool: str = "prefork", concurrency: int = 2, **settings: str) -> subprocess.Popen[bytes]:
        options = [f"--pool={pool}", f"--concurrency={concurrency}", f"--hostname={queue}@tests", f"--queues={queue}"]
        log = None if os.environ.get("TEST_LOG") else subprocess.DEVNULL
        command = [sys.executable, "-m", "tests.server.workers", *options]
        workers.append(spawn(command, env=surroundings | settings, stdout=log, stderr=log))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()
        worker.wait()


@pytest.fixture(scope="package")
def worker(start: Start) -> subprocess.Popen[bytes]:
    """The worker that most tests share, ready; nobody may kill it, only its children."""
    worker = start("celery", concurrency=8, TEST_EVENTS="1")
    wait_until(lambda: project.app.control.ping(destination=["celery@tests"], timeout=1))
    return worker


@pytest.fixture
def what(request: pytest.FixtureRequest) -> str:
    """The subject of the tasks of a test; no two tests have the same."""
    return str(request.node.name)


@pytest.fixture(scope="package")
def stages(results: Server, broker: str) -> Iterator[Callable[[str], project.Stage]]:
    made: list[project.Stage] = []

    @cache
    def stage(what: str) -> project.Stage:
        made.append(project.Stage(results.url, what))
        return made[-1]

    yield stage
    for each in made:
        each.close()


@pytest.fixture
def stage(stages: Callable[[str], project.Stage], what: str) -> project.Stage:
    return stages(what)
