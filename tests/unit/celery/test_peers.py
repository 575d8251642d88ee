"""
What the tests of celery-once 3.0.1 and celery-singleton 0.3.1 expect of their base classes, asked of ours.

The differences that the migration page lists are the last tests of each part.
"""

import uuid

import pytest
from celery import states

from django_redlock import locks
from django_redlock.celery.migration import AlreadyQueued, QueueOnce, Singleton


@pytest.fixture
def declare(app):
    """Declare a task with a base class."""

    def declare(body, name, base, **options):
        body.__name__ = "body"  # Celery makes code of it, which the name of a lambda cannot be
        return app.task(base=base, name=name, lazy=False, **options)(body)

    return declare


@pytest.fixture
def once(declare):
    """Declare a task as users of celery-once do."""

    def once(body=lambda a=1, b=2: [a, b], name="example", base=QueueOnce, **options):
        return declare(body, name, base, **options)

    return once


@pytest.fixture
def singleton(declare):
    """Declare a task as users of celery-singleton do."""

    def singleton(body=lambda *args: args, name="simple_task", **options):
        return declare(body, name, Singleton, **options)

    return singleton


def left(task, *args):
    """Return for how many seconds the slot of a call lasts."""
    return task.singleton.holder(*args).ttl


# celery-once


@pytest.mark.parametrize("eager", [False, True])
def test_already_queued(app, once, eager):
    """A held lock raises with the seconds until it ends; a graceful call does not raise; a lock that ended is taken."""
    app.conf.task_always_eager = eager
    task = once()

    with locks["default"].lock(task.singleton.key(1), ttl=30, wait=0):
        with pytest.raises(AlreadyQueued) as error:
            task.delay(1)
        assert 25 < error.value.countdown <= 30
        assert "Expires in" in error.value.message
        graceful = task.apply_async((1,), once={"graceful": True})
    assert graceful.duplicate

    assert task.delay(1).accepted


def test_differences_from_celery_once(once, worker):
    """The differences that the migration page lists: defaults, types, given ids, graceful duplicates, backends."""
    task = once(once={"graceful": True})

    assert task.singleton.key(1) == task.singleton.key(1, 2)  # a default counts as if it were given
    assert task.singleton.key(1) != task.singleton.key("1")
    first = task.delay(1)
    joined = task.delay(1)
    assert (joined.id, joined.accepted) == (first.id, False)  # the result of the first, not one without a value
    assert task.apply_async((1,), task_id="own").accepted  # a call with an id is sent, and the worker decides
    assert worker.run_all() == [states.SUCCESS, states.SUCCESS]
    gone = ("once_backend", "once_config", "config", "default_timeout", "get_key", "clear_lock")
    assert [name for name in gone if hasattr(task, name)] == []


# celery-singleton


def test_differences_from_celery_singleton(singleton, worker):
    """The differences that the migration page lists: spelling, values without JSON, given ids, retries, methods."""
    runs = []

    def body(self, a, b=2):
        runs.append(self.request.id)
        if len(runs) == 1:
            raise self.retry(countdown=0)

    task = singleton(body, bind=True)

    assert task.singleton.key(1) == task.singleton.key(a=1) == task.singleton.key(1, b=2)
    number = uuid.uuid4()
    assert task.singleton.key(number) == task.singleton.key(number)  # without an encoder of the project's
    first = task.delay(1)
    assert task.apply_async((1,), task_id="own").accepted  # the worker decides
    assert worker.run_all() == [states.RETRY, states.IGNORED, states.SUCCESS]
    assert runs == [first.id, first.id]  # a retry is not lost
    gone = ("generate_lock", "aquire_lock", "get_existing_task_id", "unlock", "lock_and_run", "on_duplicate")
    assert [name for name in (*gone, "singleton_backend", "singleton_config") if hasattr(task, name)] == []
