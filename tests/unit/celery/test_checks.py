"""System checks of singletons."""

import logging
import re
import sys
from logging.config import dictConfig

import pytest
from celery import Celery, Task
from celery.signals import celeryd_after_setup, worker_process_init
from django.core.checks import run_checks
from django.test import override_settings

from django_redlock.celery import SingletonTask, singleton_task


def nothing(): ...


def check_singletons():
    """Return what the system checks find about singletons."""
    found = run_checks(tags=["redlock"], databases=[])
    return [each for each in found if each.id[:11] in ("redlock.E02", "redlock.W02")]


@pytest.fixture
def declare(app):
    """Declare a singleton, and return the ids of what is found."""

    def declare(**options):
        singleton_task(**({"name": "shop.checked"} | options))(nothing)
        app.finalize()
        # Other tests' tasks may be there, too.
        return [found.id for found in check_singletons() if "shop.checked" in found.msg or "shop.nightly" in found.msg]

    return declare


def test_nothing_without_an_app(monkeypatch):
    """A project without Celery is not looked at."""
    from celery import _state

    monkeypatch.setattr(_state, "default_app", None)
    monkeypatch.setattr(_state._tls, "current_app", None)

    assert check_singletons() == []


def test_module_that_cannot_be_imported_is_reported_and_stops_no_command(app, declare, monkeypatch):
    """``manage.py migrate`` runs the checks, too, and may create the very table that the module wants to read."""
    monkeypatch.setitem(sys.modules, "shop.broken", None)
    app.conf.imports = ["shop.broken"]
    assert declare(lease=61.0) == ["redlock.E020"]  # the tasks that are known are checked

    [found] = [found for found in check_singletons() if found.id == "redlock.W027"]

    assert "ModuleNotFoundError: import of shop.broken halted" in found.msg
    assert not found.is_serious()


LATE, QUEUE = {"acks_late": True}, {"scope": "until_executing"}
LONG, LIMIT, SHORT, ONCE = {"max_hold": 9000}, {"time_limit": 7200}, {"time_limit": 300}, {"redelivery": "drop"}
REDIS = {"broker_url": "redis://127.0.0.1:1"}
LATER = REDIS | {"broker_transport_options": {"visibility_timeout": 9000}}
SOFT = {"task_time_limit": 300, "task_soft_time_limit": 60}
RPC = {"result_backend": "rpc://"}


@pytest.mark.parametrize(
    ("setting", "options", "found"),
    [
        # Options that cannot work, that leave no time for heartbeats, or let a run outlast its slot
        ({}, {}, []),
        ({}, {"lease": 61.0}, ["redlock.E020"]),
        ({}, {"lease": 5.0}, ["redlock.W020"]),
        ({}, {"on_overlap": "follow", "ignore_result": True}, ["redlock.W022"]),
        ({}, {"using": "nowhere"}, ["redlock.E021"]),
        ({}, {"time_limit": 3601}, ["redlock.W025"]),
        ({}, {"time_limit": 300, "max_hold": 200}, ["redlock.W025"]),
        ({}, {"time_limit": 3601} | QUEUE, []),
        # With late acknowledgement and Redis, a time limit below both max_hold and visibility_timeout
        (REDIS, LATE, ["redlock.W021"]),
        (REDIS, LATE | QUEUE, ["redlock.W021"]),
        (REDIS, LATE | SHORT, []),
        (LATER, LATE | LIMIT | LONG, []),
        (REDIS, LATE | LIMIT | LONG, ["redlock.W021"]),
        (LATER, LATE | LIMIT, ["redlock.W025"]),  # it ends before its message comes again
        (REDIS, LATE | LIMIT, ["redlock.W021"]),  # no second warning, W025
        (REDIS, LATE | ONCE, []),
        (REDIS, LATE | ONCE | QUEUE, ["redlock.W021"]),
        ({"broker_url": ["redis://127.0.0.1:1", "redis://127.0.0.1:2"]}, LATE, ["redlock.W021"]),
        ({"broker_url": "amqp://127.0.0.1:1;rediss://127.0.0.1:2"}, LATE, ["redlock.W021"]),
        ({"broker_read_url": "redis://127.0.0.1:1"}, LATE, ["redlock.W021"]),
        ({"broker_url": "amqp://127.0.0.1:1"}, LATE, []),  # which does not say when it delivers again
        # A soft time limit of the project that would end a task which may run for long by its own options
        (SOFT, {}, []),  # short, as far as anybody knows
        (SOFT, LIMIT | LONG, ["redlock.W028"]),
        (SOFT, LONG, ["redlock.W028"]),
        (SOFT, LIMIT | LONG | {"soft_time_limit": 7000}, []),
        (SOFT, {"time_limit": 50}, []),
        # Results that a duplicate in another process never gets
        (RPC, {}, ["redlock.W026"]),
        (RPC, {"on_duplicate": "raise"}, []),
        (RPC, {"scope": "while_executing"}, []),
        (RPC, {"ignore_result": True}, []),
        # A beat schedule that names a task that cannot be imported here
        ({"beat_schedule": {"nightly": {"task": "shop.nightly", "schedule": 60.0}}}, {}, ["redlock.W024"]),
    ],
)
def test_what_is_found(app, declare, setting, options, found):
    """Settings and options that do not fit each other are found, each cause by one check."""
    app.conf.update(setting)
    with override_settings(REDLOCK={"default": {"NODES": "memory://a", "OPTIONS": {"node_timeout": 1.0}}}):
        assert declare(**options) == found


@pytest.mark.parametrize(
    ("options", "what", "hint"),
    [
        (
            {},
            r"no time limit\..*waits for the slot of the run; if the run goes on after max_hold, 3600 s, both run",
            r"a time_limit below .* and max_hold",
        ),
        (LIMIT | LONG, r"is dropped if it succeeded, and runs", r"^Make the broker's visibility_timeout"),
        (LIMIT, r"limit of 7200 s\..* after max_hold, 3600 s, both run", r"timeout and max_hold of the task longer"),
        (LIMIT | QUEUE, r"runs beside it", r"^Make the broker's visibility_timeout"),
        (QUEUE, r"runs beside it", r"a time_limit below the broker's visibility_timeout\.$"),
    ],
)
def test_advice_for_late_acknowledgement(app, options, what, hint):
    """It says what happens to the copy, and asks for no value that the task has."""
    app.conf.update(REDIS)
    singleton_task(name="shop.checked", acks_late=True, **options)(nothing)
    app.finalize()

    [found] = [found for found in check_singletons() if "shop.checked" in found.msg]

    assert re.search(what, found.msg)
    assert re.search(hint, found.hint)
    assert ("time_limit" in found.hint) is ("time_limit" not in options)


def test_class_without_the_projects(monkeypatch, app):
    """A singleton that is a class of its own and not of the project's task class is found."""

    class Ours(Task):
        pass

    class Alone(SingletonTask):
        name = "shop.alone"

        def run(self): ...

    with Celery("own", task_cls=Ours, broker="memory://") as own:
        own.register_task(Alone())
        assert [found.id for found in check_singletons() if "shop.alone" in found.msg] == ["redlock.W023"]


@pytest.fixture
def loggers():
    """Leave the loggers of other tests as they are."""
    every = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    disabled = {each: each.disabled for each in every}
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:], logging.root.level = handlers, level
    for each, was in disabled.items():
        each.disabled = was


@pytest.mark.parametrize("signal", [celeryd_after_setup, worker_process_init])
def test_logger_survives_the_logging_of_a_worker(app, loggers, monkeypatch, caplog, signal):
    """A logging configuration that disables other loggers does not keep the losses of a worker out of its log."""
    monkeypatch.setenv("CELERY_SKIP_CHECKS", "1")
    logger = logging.getLogger("django_redlock")
    dictConfig({"version": 1, "incremental": False, "disable_existing_loggers": True})
    assert logger.disabled
    logging.root.addHandler(caplog.handler)

    signal.send(sender="tests", instance=None, conf=app.conf)
    signal.send(sender="tests", instance=None, conf=app.conf)

    assert not logger.disabled
    [message] = [record.message for record in caplog.records if record.name == "django_redlock"]
    assert 'Write "disable_existing_loggers": False' in message
