"""The decorator and its options."""

from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import pytest
from celery import Task
from django.test import override_settings
from kombu.transport.memory import Channel

from django_redlock import InvalidRedlockError, lock
from django_redlock.celery import SingletonOptions, SingletonTask, singleton_task
from django_redlock.singleton.options import OPTIONS


def nothing(x: Any = 1) -> None: ...


async def later() -> None: ...


def each() -> Any:
    yield


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"on_duplicate": "jion"}, ValueError, r"on_duplicate must be one of .*'jion'; did you mean 'join'\?"),
        ({"on_overlap": "weit"}, ValueError, r"on_overlap must be one of .*, not .weit.; did you mean .wait.\?"),
        ({"on_duplicates": "skip"}, TypeError, "has no option 'on_duplicates'; its own are key, "),
        ({"unique_on": ["x"]}, TypeError, "has no option 'unique_on'; its own are key, "),  # of another package
        ({"lease": 0}, ValueError, "lease must be more than 0 seconds"),
        ({"queue_ttl": float("nan")}, ValueError, "queue_ttl must be a finite number"),
        ({"lock_direct_calls": "no"}, TypeError, "lock_direct_calls must be True or False, not 'no'"),
        ({"max_hold": 9, "scope": "until_executing"}, ValueError, "max_hold has no meaning with scope='until_execu"),
        ({"on_unavailable": {"enqueue": "raise"}, "scope": "while_executing"}, ValueError, "'enqueue'.*no meaning"),
        ({"using": None}, TypeError, "using must be the name of an alias"),
        ({"group": ""}, TypeError, "group must be None or a name"),
        ({"version": "2"}, TypeError, "version must be a whole number"),
        ({"key": ("z",)}, ValueError, "'z', which is not a parameter"),
    ],
)
def test_wrong_option_fails_when_decorating(options, error, message):
    """A wrong option fails at import, and the message has the right ones."""
    with pytest.raises(error, match=message):
        singleton_task(**options)(nothing)


@pytest.mark.parametrize("name", sorted({*signature(lock).parameters} - {*OPTIONS, "name"}))
def test_option_of_a_lock_is_refused(name):
    """Celery would take what only ``lock()`` knows for an attribute of the task, without any effect."""
    with pytest.raises(TypeError, match=rf"singleton_task\(\) has no option '{name}'; "):
        singleton_task(**{name: 1})(nothing)


@pytest.mark.parametrize(
    ("decorated", "message"),
    [
        (Task(), "remove the other task decorator"),
        (dict, "not the class dict. Derive it from SingletonTask"),
        ("shop.tasks.pay", "decorates a function, not 'shop.tasks.pay'"),
        (later, "the slot would be free before the body of later runs.*async_to_sync"),
        (partial(later), "the slot would be free before the body of .*later"),
        (each, "the slot would be free before the body of each runs"),
        (contextmanager(each), "the slot would be free before the body of each runs"),
    ],
)
def test_only_a_function_becomes_a_task(decorated, message):
    """Celery alone would fail later, with an error of its own machinery."""
    with pytest.raises(TypeError, match=message):
        singleton_task(decorated)


# Celery 5.7 deprecates them for a task of any kind.
@pytest.mark.filterwarnings(r"ignore:\s*The '\w+' task attribute is deprecated")
def test_queue_of_a_task(app):
    """Options and attributes that Celery or the project reads from a task are no misspellings of ours, and work."""
    names = ("compression", "delivery_mode", "exchange", "immediate", "mandatory", "queue", "routing_key")
    singleton_task(name="shop.all", **dict.fromkeys(names))(nothing)

    about = {"acks_late": True, "max_retries": 7, "autoretry_for": (OSError,), "colour": "red"}
    task = singleton_task(name="shop.slow", queue="slow", **about)(nothing)
    task.delay()

    assert (task.acks_late, task.max_retries, task.name, task.colour) == (True, 7, "shop.slow", "red")
    assert Channel.queues["slow"].qsize() == 1


def test_task_as_a_class(app):
    """A task can be a class with ``singleton_options``."""

    class Sync(SingletonTask[[int], int]):
        name = "shop.as_class"
        singleton_options = SingletonOptions(key=("shop_id",))

        def run(self, shop_id: int, since: object = None) -> int:
            return shop_id

    task = app.register_task(Sync())

    assert task.delay(7).id == task.delay(7, since=1).id


@pytest.mark.parametrize("whole", [False, True], ids=["base", "app"])
def test_options_of_the_task_class(app, whole):
    """A decorated task has the options of its class, and its own win."""

    class Serial(SingletonTask):
        abstract = True
        singleton_options = SingletonOptions(scope="while_executing", on_unavailable={"run": "fail"}, lease=20)

    if whole:
        app.task_cls = Serial
    task = singleton_task(name="shop.serial", lease=10, **({} if whole else {"base": Serial, "limit": 3}))(nothing)
    found = task.singleton_options

    assert (found.scope, found.on_unavailable, found.lease) == ("while_executing", {"run": "fail"}, 10)


def test_settings_are_read_by_the_first_call(app, worker):
    """Decorating works without them; a lease that they forbid is the caller's error, not one that only workers see."""
    task = singleton_task(name="shop.long", lease=61)(nothing)
    with override_settings(REDLOCK=None), pytest.raises(InvalidRedlockError, match="REDLOCK setting is missing"):
        task.delay()

    with pytest.raises(ValueError, match=r"lease=61 of the singleton shop.long: .*OPTIONS\['max_ttl'\]"):
        task.delay()

    assert worker.headers == []


def test_options_that_celery_would_lose(app):
    """Options of a singleton given to Celery's own decorator are refused with what to write."""
    with pytest.raises(TypeError, match=r"lease=5.*singleton_options=SingletonOptions\(lease=\.\.\.\)"):

        @app.task(base=SingletonTask, lease=5, lazy=False)
        def sync(shop_id):
            pass


@pytest.mark.parametrize("name", ["publish", "ticket", "parameters", "execution", "duplicate_error"])
def test_names_of_the_projects_own(app, worker, name):
    """The names of a project's own methods in its task class stay its own."""
    calls = []
    Ours = type("Ours", (app.Task,), {name: lambda self, event: calls.append(event)})

    @singleton_task(name="shop.named", base=Ours, bind=True)
    def named(self, shop_id):
        getattr(self, name)("event")

    named.delay(7)

    assert worker.run() == "SUCCESS"
    assert calls == ["event"]
