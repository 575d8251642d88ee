"""Requests to locked views of a real server: fifty at once under ATOMIC_REQUESTS, and some whose clients go away."""

import gc
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from subprocess import DEVNULL
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from django.http import HttpResponse
from django.test import Client

pytest.importorskip("gunicorn", reason="needs gunicorn: pip install gunicorn")
pytest.importorskip("uvicorn", reason="needs uvicorn: pip install uvicorn")

from django_redlock.testing.servers import reserve_port
from tests.managers import wait_until
from tests.shop.helpers import is_free
from tests.shop.models import Order

from .conftest import PATIENCE, Live

REQUESTS = 50
GUNICORN = [
    "gunicorn",
    "django.core.wsgi:get_wsgi_application()",
    "--workers=2",
    "--threads=25",
    "--log-level=warning",
    "--no-control-socket",
]
GEVENT = ["--worker-class=gevent" if option == "--threads=25" else option for option in GUNICORN]
UVICORN = ["uvicorn", "--factory", "django.core.asgi:get_asgi_application", "--log-level=warning", "--lifespan=off"]


@contextmanager
def serving(live: Live, command: list[str], **options: Any) -> Iterator[int]:
    """Run a web server of the project in this folder in a ``with`` block, which gets its port."""
    port = reserve_port(live)
    where = [f"--bind=127.0.0.1:{port}"] if command[0] == "gunicorn" else [f"--port={port}"]
    process = live.python("-m", *command, *where, stdin=DEVNULL, stdout=DEVNULL, **options)

    def listens() -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        assert process.poll() is None, process.communicate()[1]
        return False

    wait_until(listens)
    yield port
    process.terminate()
    process.communicate(timeout=PATIENCE)


@pytest.fixture
def site(live: Live, database: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a running server of the kind that the test names."""
    with serving(live, request.param) as port:
        yield f"http://127.0.0.1:{port}"


def post(url: str) -> dict[str, Any]:
    with urlopen(Request(url, method="POST", headers={"Accept": "application/json"}), timeout=4 * PATIENCE) as response:
        return json.loads(response.read())


@pytest.mark.parametrize("engine", ["postgresql", pytest.param("sqlite", marks=pytest.mark.endurance)], indirect=True)
@pytest.mark.parametrize(
    ("site", "paths"),
    [
        pytest.param(GUNICORN, ("/count/7/", "/count-class/8/"), id="gunicorn"),
        pytest.param(GEVENT, ("/count/7/", "/count-class/8/"), id="gunicorn with gevent"),
        pytest.param(UVICORN, ("/count/7/", "/acount/8/"), id="uvicorn"),
    ],
    indirect=["site"],
)
def test_requests_at_once_see_what_the_one_before_committed(site: str, database: str, paths: tuple[str, str]):
    """Each of 50 requests to a function, a class or a coroutine function reads what the last one has committed."""
    Order.objects.using(database).bulk_create([Order(pk=7), Order(pk=8)])

    with ThreadPoolExecutor(REQUESTS) as pool:
        for path in paths:
            answers = list(pool.map(post, [site + path] * REQUESTS))

            assert sorted(answer["seen"] for answer in answers) == list(range(REQUESTS))
            assert all(answer["atomic"] for answer in answers)

    assert list(Order.objects.using(database).values_list("total", flat=True)) == [REQUESTS] * 2


def status_of(url: str) -> int:
    """Return the status of the answer to a POST request."""
    try:
        post(url)
    except HTTPError as error:
        with error:
            return error.code
    return 200


@pytest.mark.parametrize("path", ["/left/", "/aleft/"], ids=["locked_paths", "locked_view"])
def test_client_that_goes_away_does_not_free_the_lock_of_work_that_goes_on(live: Live, path: str):
    """The server cancels the request, but not the thread of the view; the lock is kept until that is done."""
    with serving(live, UVICORN) as port:
        site = f"http://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n".encode())
            assert post(f"{site}/event/begun/wait/")["answer"]
        assert post(f"{site}/event/cancelled/wait/")["answer"]

        assert status_of(site + path) == 409
        post(f"{site}/event/over/set/")
        wait_until(lambda: status_of(site + path) == 200)


@pytest.mark.django_db
def test_lock_of_a_stream_is_renewed_when_the_event_loop_of_its_view_is_over(shop: None, settings: Any, leases: Any):
    """WSGI runs an asynchronous view in an event loop of its own, and reads the response after the end of that loop."""
    settings.REDLOCK = {"default": {"NODES": ["memory://a"], "OPTIONS": {"ttl": 1.0}}}
    response = Client().post("/astream/7/")
    [lease] = leases

    wait_until(lambda: lease.extensions >= 2 or not lease.valid())

    assert lease.valid()
    response.close()
    assert lease.reason == "released"


def drops(get_response: Any) -> Any:
    """A middleware that shows another page in place of every response."""

    def middleware(request: Any) -> HttpResponse:
        get_response(request)
        return HttpResponse("maintenance", status=503)

    return middleware


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["/stream/7/", "/file/7/", "/astream/7/"])
def test_response_that_a_middleware_drops_frees_the_lock(shop: None, settings: Any, path: str):
    """It is freed long before its ttl, and without the garbage collector, whose next run may be hours away."""
    settings.REDLOCK = {"default": {"NODES": ["memory://a"], "OPTIONS": {"ttl": 600.0, "max_ttl": 600.0}}}
    settings.MIDDLEWARE = [f"{__name__}.drops"]
    gc.disable()
    try:
        assert Client().post(path).status_code == 503
        wait_until(lambda: is_free("view:order:7"))
    finally:
        gc.enable()
