"""
Fifty requests at once to a locked view of a real server, under ATOMIC_REQUESTS, over real nodes and a real database.
"""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from signal import SIGTERM
from subprocess import DEVNULL
from typing import Any

import pytest

pytest.importorskip("gunicorn", reason="needs gunicorn: pip install gunicorn")
pytest.importorskip("uvicorn", reason="needs uvicorn: pip install uvicorn")

from django_redlock.testing.servers import reserve_port
from tests.shop.models import Order

from .conftest import PATIENCE, Live

REQUESTS = 50
GUNICORN = [
    "gunicorn",
    "tests.server.live.wsgi",
    "--workers=2",
    "--threads=25",
    "--log-level=warning",
    "--no-control-socket",
]
UVICORN = ["uvicorn", "tests.server.live.asgi:application", "--log-level=warning", "--lifespan=off"]


class Site:
    """A server of the project in this folder, used by one test."""

    def __init__(self, live: Live, command: list[str], **options: Any) -> None:
        self.port = reserve_port(self)
        where = [f"--bind=127.0.0.1:{self.port}"] if command[0] == "gunicorn" else [f"--port={self.port}"]
        self.process = live.python("-m", *command, *where, stdin=DEVNULL, stdout=DEVNULL, **options)
        self._wait()

    def post(self, path: str) -> tuple[int, dict[str, object]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=4 * PATIENCE)
        try:
            connection.request("POST", path)
            response = connection.getresponse()
            body = response.read()
            return response.status, json.loads(body) if response.status == 200 else {"body": body}
        finally:
            connection.close()

    def _wait(self) -> None:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                if self.process.poll() is not None or time.monotonic() > until:
                    self.process.kill()
                    pytest.fail((self.process.communicate()[1] or b"it does not listen").decode())
                time.sleep(0.05)

    def stop(self) -> None:
        self.process.send_signal(SIGTERM)
        self.process.communicate(timeout=PATIENCE)


@pytest.fixture
def site(live: Live, database: str, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A running server of the kind that the test names."""
    started = Site(live, request.param)
    yield started
    started.stop()


@pytest.mark.parametrize("engine", ["postgresql", pytest.param("sqlite", marks=pytest.mark.endurance)], indirect=True)
@pytest.mark.parametrize(
    ("site", "paths"),
    [
        pytest.param(GUNICORN, ("/count/7/", "/count-class/8/"), id="gunicorn"),
        pytest.param(UVICORN, ("/count/7/", "/acount/8/"), id="uvicorn"),
    ],
    indirect=["site"],
)
def test_requests_at_once_see_what_the_one_before_committed(site: Site, database: str, paths: tuple[str, str]):
    """
    Each of 50 concurrent requests to a view reads what the previous one has committed, and no request is lost.
    The views are a function, a class, and a coroutine function.
    """
    Order.objects.using(database).bulk_create([Order(pk=7), Order(pk=8)])

    with ThreadPoolExecutor(REQUESTS) as pool:
        for path in paths:
            answers = list(pool.map(site.post, [path] * REQUESTS))

            assert [status for status, _ in answers] == [200] * REQUESTS, answers
            assert sorted(answer["seen"] for _, answer in answers) == list(range(REQUESTS))
            assert all(answer["atomic"] for _, answer in answers)

    assert list(Order.objects.using(database).values_list("total", flat=True)) == [REQUESTS] * 2
