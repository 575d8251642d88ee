"""
A Celery app in memory, and a worker that does nothing but trace messages, one at a time, when a test says so.

The effects of processes on tasks are tested in ``tests/server/workers/``, with real ones.
"""

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, _state, states
from celery.app.trace import build_tracer
from celery.backends import cache
from celery.worker.request import Request
from kombu.transport.memory import Channel

from django_redlock import locks
from django_redlock.celery import dispatch, singleton_task
from django_redlock.celery.dispatch import CONTENT_HEADER, RECEIVED_HEADER
from django_redlock.celery.parent import mixed_request
from django_redlock.runtime.clock import steady


@pytest.fixture
def memory_nodes() -> list[Any]:
    """The nodes in memory."""
    return list(locks["default"].nodes)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """An app of this test's own: other tests' tasks do not get into it, nor its tasks into other apps."""
    monkeypatch.setattr(_state, "_apps", weakref.WeakSet())
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))
    monkeypatch.setattr(_state, "default_app", None)
    monkeypatch.setattr(_state._tls, "current_app", None)
    monkeypatch.setattr(dispatch, "_beat", 0)
    monkeypatch.setattr(dispatch, "_unanswered", set())
    monkeypatch.setattr(dispatch, "_renaming", set())
    monkeypatch.setattr(Channel, "queues", {})
    cache._DUMMY_CLIENT_CACHE.clear()
    app = Celery("tests", broker="memory://", backend="cache+memory://")
    yield app
    app.close()


class Worker:
    """A worker without processes: it runs a message when the test says so, and as a real one would."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        # What each run of a task of ``make`` had.
        self.ids: list[str] = []
        self.shops: list[Any] = []
        self.values: list[Any] = []
        self.retries: list[int] = []
        # The messages that the broker has back, and delivers again.
        self.returned: list[Any] = []

    @property
    def headers(self) -> list[dict[str, Any]]:
        """The headers of the messages that wait."""
        queue = Channel.queues.get("celery")
        return [message["headers"] for message in queue.queue] if queue else []

    def take(self) -> Any:
        """Return the next message and remove it from the queue, or return None."""
        with self.app.connection_for_read() as connection:
            return connection.default_channel.basic_get("celery", no_ack=True)

    def run(self, message: Any = None, *, redelivered: bool = False, kept: float = 0.0) -> str:
        """Run a message, or the next one, which a worker has had for some seconds; returns the state it ended in."""
        message = message or self.take()
        args, kwargs, embed = message.payload
        info = {"exchange": "", "routing_key": "celery", "redelivered": redelivered}
        request = {**message.headers, "delivery_info": info, "is_eager": False, **embed}
        request[RECEIVED_HEADER] = steady() - kept
        request[CONTENT_HEADER] = message.content_type
        task = self.app.tasks[message.headers["task"]]
        traced = build_tracer(task.name, task, app=self.app)(message.headers["id"], args, kwargs, request)
        if traced.info and traced.info.state == states.REJECTED and traced.info.retval.requeue:
            self.returned.append(message)
        return str(traced.info.state if traced.info else states.SUCCESS)

    def run_all(self) -> list[str]:
        """Run messages until there are none; returns the states in which they ended."""
        return [self.run(message) for message in iter(self.take, None)]


@pytest.fixture
def worker(app: Celery) -> Worker:
    return Worker(app)


@pytest.fixture
def received(worker: Worker) -> Any:
    """Take the next message as a worker's main process does; returns its request."""

    def received(task: Any, message: Any) -> Any:
        real = task.app.tasks[task.name]
        about = {"headers": message.headers, "body": message.body, "hostname": "tests"}
        about["on_reject"] = lambda log, errors, requeue: worker.returned.extend([message] * requeue)
        events = SimpleNamespace(enabled=False, send=lambda *about, **more: None)
        return mixed_request(Request)(message, app=task.app, task=real, eventer=events, **about)

    return received


@pytest.fixture
def make(worker: Worker) -> Any:
    """Make a singleton task of this test's app, out of a body that gets the task itself and the shop."""

    def make(body: Any = lambda self, shop_id: shop_id, **options: Any) -> Any:
        def sync(self, shop_id, since=None):
            worker.ids.append(self.request.id)
            worker.shops.append(shop_id)
            worker.values.append(since)
            worker.retries.append(self.request.retries)
            return body(self, shop_id)

        return singleton_task(bind=True, **({"name": "shop.sync", "key": ("shop_id",)} | options))(sync)

    return make
