"""
What the tests of celery-once 3.0.1 and celery-singleton 0.3.1 expect of their base classes, asked of ours.

The differences that the migration page lists are the last tests of each part.
"""

import uuid

import pytest
from celery import states
from kombu.exceptions import OperationalError

from django_redlock import locks
from django_redlock.celery.migration import AlreadyQueued, DuplicateTaskError, QueueOnce, Singleton

from .slots import names


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


def test_keys_of_celery_once(once):
    """
    Arguments by position and by name, bound tasks and nested dicts make the keys that they made. C1 C2 C6
    """
    plain, bound = once(), once(lambda self, a, b: a, "bound", bind=True, autoretry_for=(OSError,))

    assert plain.singleton.key(1, 2) == plain.singleton.key(a=1, b=2) != plain.singleton.key(1, 3)
    assert bound.singleton.key(1, 2) == bound.singleton.key(a=1, b=2) != bound.singleton.key(1, 3)
    assert plain.singleton.key({"a": 1, "é": {"c": 2, "b": 3}}) == plain.singleton.key({"é": {"b": 3, "c": 2}, "a": 1})


def test_chosen_keys_of_celery_once(once):
    """
    With ``keys`` only those parameters count. C1
    """
    task = once(once={"keys": ["a"]})

    assert task.singleton.key(1, 2) == task.singleton.key(1, 3) != task.singleton.key(2, 2)


def test_timeouts_of_celery_once(app, once):
    """
    A slot lasts for an hour, for the ``default_timeout`` of the settings, or for the ``timeout`` of the call. C29
    """
    task = once()
    task.delay(1)
    assert 3595 < left(task, 1) <= 3600
    task.apply_async((2,), once={"timeout": 120})
    assert 115 < left(task, 2) <= 120

    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"default_timeout": 60}}
    other = once(name="other")
    other.delay(1)
    assert 55 < left(other, 1) <= 60


@pytest.mark.parametrize("eager", [False, True])
def test_already_queued(app, once, eager):
    """
    A held lock raises with the seconds until it ends; a graceful call does not raise; a lock that ended is taken. C44
    """
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


def test_lock_is_held_while_the_task_runs(app, once):
    """
    The body of a task in eager mode finds its lock taken, and the lock is free afterwards. C44
    """
    app.conf.task_always_eager = True
    task = once(lambda a=1: names())

    assert task.delay(1).get() == {task.singleton.key(1)}
    assert names() == set()


def test_unlock_before_run(once, worker):
    """
    With ``unlock_before_run`` the body finds its lock free. C16
    """
    with pytest.warns(UserWarning, match="overlap"):
        task = once(lambda a=1: sorted(names()), once={"unlock_before_run": True})
    result = task.delay(1)

    worker.run_all()

    assert result.get(timeout=1) == []


def test_retry_with_celery_once(once, worker):
    """
    A retry with other arguments is sent, runs, and frees the lock. C51 C55
    """
    runs = []

    def body(self, a=0):
        runs.append(a)
        if a != 1:
            raise self.retry(kwargs={"a": 1}, countdown=0)

    task = once(body, bind=True, once={"keys": []})
    task.apply_async()
    worker.run_all()

    assert (runs, names()) == ([0, 1], set())


def test_own_subclass(once, worker):
    """
    A subclass of a project with a ``__call__`` of its own, as for Flask's context, surrounds the body. C46
    """
    entered = []

    class Context(QueueOnce):
        abstract = True

        def __call__(self, *args, **kwargs):
            entered.append(args)
            return super().__call__(*args, **kwargs)

    result = once(base=Context).delay(1)
    worker.run_all()

    assert (entered, result.get(timeout=1)) == ([(1,)], [1, 2])


def test_differences_from_celery_once(once, worker):
    """
    The differences that the migration page lists: defaults, types, given ids, graceful duplicates, backends. C1 C3
    """
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


def test_equal_calls_have_one_id(singleton):
    """
    Ten equal calls have one id, and five others have five. C34
    """
    task = singleton()

    assert len({task.apply_async(args=[1, 2, 3]).id for _ in range(10)}) == 1
    assert len({task.apply_async(args=[i, i + 1]).id for i in range(5)}) == 5
    assert task.singleton.holder(1, 2, 3).id == task.delay(1, 2, 3).id


@pytest.mark.parametrize("fails", [False, True])
def test_call_after_the_end_has_another_id(singleton, worker, fails):
    """
    After a success or a failure the next call is accepted. C38 C41
    """

    def body(*args):
        if fails:
            raise ValueError

    task = singleton(body)
    first = task.delay(1)
    worker.run_all()
    second = task.delay(1)

    assert (second.accepted, second.id != first.id) == (True, True)


def test_message_that_is_not_sent(singleton, monkeypatch):
    """
    An error of the broker reaches the caller, and the lock is free. C20
    """
    task = singleton()
    monkeypatch.setattr(task.app, "send_task", lambda *args, **options: failing())

    def failing():
        raise OperationalError("the broker is away")

    with pytest.raises(OperationalError):
        task.apply_async(args=[1, 2, 3])

    assert task.singleton.holder(1, 2, 3) is None


@pytest.mark.parametrize(
    ("of_app", "of_task", "raises"),
    [(None, None, False), (False, True, True), (True, None, True), (True, False, False)],
)
def test_raise_on_duplicate(app, singleton, of_app, of_task, raises):
    """
    The task's ``raise_on_duplicate`` comes before the app's setting; the error has the id of the first. C103
    """
    app.conf.singleton_raise_on_duplicate = of_app
    task = singleton(**({} if of_task is None else {"raise_on_duplicate": of_task}))
    first = task.delay(1)

    if raises:
        with pytest.raises(DuplicateTaskError) as error:
            task.delay(1)
        assert error.value.task_id == first.id
    else:
        assert task.delay(1).id == first.id


@pytest.mark.parametrize(
    ("unique_on", "same", "other"),
    [
        (["a", "c"], [(2, 3, 4, 5), (2, 9, 4, 9)], (3, 3, 4, 5)),
        (["b", "d"], [(2, 3, 4, 5), (9, 3, 9, 5)], (2, 4, 4, 5)),
        ("c", [(2, 3, 4), (9, 9, 4)], (2, 3, 5)),
        ("d", [(2, 3, 4), (2, 3, 4, 4)], (2, 3, 4, 5)),
    ],
)
def test_unique_on(singleton, unique_on, same, other):
    """
    With ``unique_on`` only those parameters count, with their defaults. C1
    """
    task = singleton(lambda a, b=2, c=3, d=4: a, unique_on=unique_on)

    assert task.singleton.key(*same[0]) == task.singleton.key(*same[1]) != task.singleton.key(*other)


def test_lock_expiry(app, singleton):
    """
    ``lock_expiry`` of the task, or of the settings, is how long the slot of a message lasts. C29
    """
    with pytest.warns(UserWarning, match="lock_expiry"):
        task = singleton(lock_expiry=60)
    task.delay(1)
    app.conf.singleton_lock_expiry = 90
    other = singleton(name="other")
    other.delay(1)

    assert 55 < left(task, 1) <= 60
    assert 85 < left(other, 1) <= 90


def test_differences_from_celery_singleton(singleton, worker):
    """
    The differences that the migration page lists: spelling, values without JSON, given ids, retries, methods. C1 C7
    """
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
