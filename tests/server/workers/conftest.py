"""
Real workers over real servers.

Leases are short where a lease must run out, and long where something must happen before it could.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from django.test import override_settings
from kombu import pools

from django_redlock.testing import Server, Servers
from django_redlock.testing.processes import spawn

from . import project, worker_settings
from .real import until


@pytest.fixture(scope="session")
def results() -> Iterator[Server]:
    """Where results are kept, and what tests and tasks tell each other; also the broker, as a rule."""
    with Server() as server:
        project.configure(server.url, server.url)
        yield server
        gc.collect()  # a result that is collected later talks to a server that is gone by then
        project.app.backend.result_consumer.stop()
        project.app.backend.client.close()
        hang_up()


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest, results: Server) -> Iterator[str]:
    """The URL of the broker of this module's tests."""
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


@pytest.fixture(autouse=True)
def memory_nodes() -> None:
    """Not here: these tests have real nodes."""


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def start(broker: str, results: Server, servers: Servers) -> Iterator[Start]:
    """Start a worker for some queues, and return when it is ready."""
    workers: list[subprocess.Popen[bytes]] = []

    def start(
        *queues: str, visibility: float = 3600, pool: str = "prefork", concurrency: int = 2, **environment: str
    ) -> subprocess.Popen[bytes]:
        surroundings = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "DJANGO_SETTINGS_MODULE": "tests.server.workers.worker_settings",
            "TEST_BROKER": broker,
            "TEST_RESULTS": results.url,
            "TEST_NODES": ",".join(servers.urls),
            "TEST_VISIBILITY": str(visibility),
            **environment,
        }
        name = f"{len(workers)}@tests"
        options = [f"--pool={pool}", f"--concurrency={concurrency}", "--loglevel=INFO", f"--hostname={name}"]
        options += ["--without-gossip", "--without-mingle", "--without-heartbeat", f"--queues={','.join(queues)}"]
        command = [sys.executable, "-m", "celery", "-A", "tests.server.workers.project", "worker", *options]
        log = None if os.environ.get("TEST_LOG") else subprocess.DEVNULL
        worker = spawn(command, env=surroundings, stdout=log, stderr=log)
        workers.append(worker)
        until(lambda: project.app.control.ping(destination=[name], timeout=0.3), timeout=60)
        return worker

    yield start
    for worker in workers:
        worker.kill()
        worker.wait()


@pytest.fixture(scope="module")
def worker(start: Start) -> subprocess.Popen[bytes]:
    """The worker that the tests of a module share; nobody may kill it, only its children."""
    return start("celery")


@pytest.fixture
def what(request: pytest.FixtureRequest) -> str:
    """What the tasks of a test are about; no two tests have the same."""
    return str(request.node.name)


@pytest.fixture
def stage(results: Server, what: str) -> Iterator[project.Stage]:
    stage = project.Stage(results.url, what)
    yield stage
    stage.close()
