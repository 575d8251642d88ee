"""
System checks: Celery settings with which singleton tasks do not behave as expected, and the logger (internal).

The checks inspect the tasks of the default app, and import its modules as a worker does. If the project has no app,
there is nothing to inspect. The app's ``ready()`` registers the checks. A worker runs them again when it starts,
because Celery runs Django's checks there without showing their results.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from celery import _state
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.signals import beat_init, celeryd_after_setup, worker_process_init
from celery.utils.imports import symbol_by_name
from django.core.checks import CheckMessage, Error, Warning

from ..conf import InvalidRedlockError, aliases
from ..handler import locks
from ..singleton.ticket import RUNNING, WAITING
from .task import SingletonTask

REDELIVERING = ("redis", "valkey", "sentinel")  # brokers with a visibility timeout
BEATS = 3  # heartbeats that a lease must have time for; one may come late

log = logging.getLogger("django_redlock")

_importing: WeakSet[Any] = WeakSet()
"""Apps whose tasks a check is just importing."""


@worker_process_init.connect(dispatch_uid="django_redlock.logger", weak=False)
@beat_init.connect(dispatch_uid="django_redlock.logger", weak=False)
@celeryd_after_setup.connect(dispatch_uid="django_redlock.logger", weak=False)
def keep_logger(**kwargs: Any) -> None:
    """
    Enable the logger of this package again, if the project's logging configuration has disabled it.

    Celery's processes configure logging after they have imported the tasks. A receiver of Celery's ``setup_logging``
    that calls ``dictConfig()`` without ``"disable_existing_loggers": False`` then disables all loggers that it does not
    name, and lost locks would be in no log. A project that wants this logger to be silent gives it a level.
    """
    if log.disabled:
        log.disabled = False
        log.warning(
            "The logging configuration had disabled the logger of django_redlock, which reports lost locks; it is "
            'enabled again. Write "disable_existing_loggers": False, or list "django_redlock" in "loggers".'
        )


@celeryd_after_setup.connect(dispatch_uid="django_redlock.checks", weak=False)
def check_worker(**kwargs: Any) -> None:
    """
    Check the singleton tasks of a worker that starts, unless ``CELERY_SKIP_CHECKS`` is set.

    Raises:
        SystemExit: A task cannot work as it is declared. Warnings are logged.
    """
    found = [] if os.environ.get("CELERY_SKIP_CHECKS") else check_singletons()
    messages = [message for message in found if not message.is_silenced()]
    for message in messages:
        log.log(message.level, "%s", message, extra={"event": "system_check"})
    if any(message.is_serious() for message in messages):
        raise SystemExit("The worker does not start, because of the system check errors above.")


def check_singletons(**kwargs: Any) -> list[CheckMessage]:
    """Report singleton tasks that cannot work as declared, or whose behaviour will be a surprise."""
    if _state.default_app is None and _state._tls.current_app is None:  # type: ignore[attr-defined]
        return []
    app: Any = _state.get_current_app()
    if app in _importing:  # Celery runs Django's checks when it imports the tasks
        return []
    messages = list(_import_tasks(app))
    tasks = [task for task in app.tasks.values() if isinstance(task, SingletonTask)]
    messages += [message for task in tasks for message in _check_task(app, task)]
    return messages + list(_check_beat(app, tasks))


def _import_tasks(app: Any) -> Iterator[CheckMessage]:
    """Import the modules with tasks, as a worker does, and report one that fails: a command may not need the tasks."""
    _importing.add(app)
    try:
        app.loader.import_default_modules()
    except Exception as error:
        yield Warning(
            f"The modules with Celery tasks cannot be imported, so not all singleton tasks are checked. "
            f"{type(error).__name__}: {error}",
            hint="Correct the module, without which no worker starts. A module must not query the database when it is "
            "imported.",
            id="redlock.W027",
        )
    finally:
        _importing.discard(app)


def _check_task(app: Any, task: Any) -> Iterator[CheckMessage]:
    yield from _lease(task)
    yield from _duration(app, task)
    yield from _results(task)
    yield from _reach(task)
    chosen = symbol_by_name(app.task_cls)  # the task class that the project has chosen for its app
    if not isinstance(task, chosen):
        yield Warning(
            f"The singleton task {task.name} is not of the app's own task class {chosen.__name__}.",
            hint="Derive its class from app.Task too, or use @singleton_task, which does.",
            id="redlock.W023",
        )


def _lease(task: Any) -> Iterator[CheckMessage]:
    options = task.singleton_options
    try:
        rules = locks[options.using].rules
        rules.check_ttl(options.lease)
    except InvalidRedlockError:
        with suppress(InvalidRedlockError):  # check_settings reports everything else that is wrong
            if options.using not in aliases():
                known = ", ".join(map(repr, aliases()))
                yield Error(
                    f"using={options.using!r} of the singleton task {task.name}: REDLOCK has no such alias. "
                    f"It has {known}.",
                    id="redlock.E021",
                )
        return
    except ValueError as error:
        yield Error(f"lease={options.lease:g} of the singleton task {task.name}: {error}", id="redlock.E020")
        return
    shortest = BEATS * 2 * (rules.node_timeout or 0.0)  # the default fits each lease
    if options.lease < shortest:
        yield Warning(
            f"lease={options.lease:g} of the singleton task {task.name} leaves no time for {BEATS} heartbeats if "
            "nodes are slow.",
            hint=f"Make it {shortest:g} s or longer, or OPTIONS['node_timeout'] shorter.",
            id="redlock.W020",
        )


def _duration(app: Any, task: Any) -> Iterator[CheckMessage]:
    """Report a task that may run for longer than its slot lasts, or than its broker waits for the acknowledgement."""
    limit, options, slot = task.time_limit or app.conf.task_time_limit, task.singleton_options, None
    if options.scope != WAITING:
        with suppress(InvalidRedlockError):
            slot = float(options.max_hold or locks[options.using].rules.max_hold)
    too_long = bool(limit and slot and limit > slot)
    visibility = _visibility(app)
    dropped = slot and options.redelivery == "drop"
    if task.acks_late and visibility and not dropped and (not limit or limit >= visibility):
        if not slot:
            copy = "The copy runs beside it: with scope='until_executing' a run has no slot."
        elif too_long or not limit:
            copy = f"The copy waits for the slot of the run; if the run goes on after max_hold, {slot:g} s, both run."
        else:
            copy = "The copy waits for the end of the run. It is dropped if it succeeded, and runs if it failed."
        longer = "the broker's visibility_timeout" + (" and max_hold of the task" if too_long else "")
        below = "the broker's visibility_timeout" + (" and max_hold" if slot else "")
        yield Warning(
            f"The singleton task {task.name} is acknowledged late and has "
            + (f"a time limit of {limit:g} s. " if limit else "no time limit. ")
            + f"After visibility_timeout, {visibility:g} s, the broker delivers its message again while it runs. "
            + copy,
            hint=f"Make {longer} longer than the limit." if limit else f"Give the task a time_limit below {below}.",
            id="redlock.W021",
        )
    elif too_long:
        yield Warning(
            f"The singleton task {task.name} may run for {limit:g} s, and its slot lasts for {slot:g} s; then a "
            "duplicate may run beside it.",
            hint="Make max_hold of the task longer than the time limit, or the limit shorter.",
            id="redlock.W025",
        )
    yield from _soft_limit(app, task)


def _visibility(app: Any) -> float | None:
    """Return after how many seconds a broker delivers an unacknowledged message again; None if it does not say."""
    urls = app.conf.broker_read_url or app.conf.broker_url or ""
    brokers = urls.split(";") if isinstance(urls, str) else list(urls)
    if not any(str(url).startswith(REDELIVERING) for url in brokers):
        return None
    return float((app.conf.broker_transport_options or {}).get("visibility_timeout", 3600))


def _soft_limit(app: Any, task: Any) -> Iterator[CheckMessage]:
    """Report a task whose own options allow a long run, which the soft time limit of the project would end."""
    # In older releases of Celery, such as 5.6.0, a task without limits of its own has None instead of the project's.
    soft, own = app.conf.task_soft_time_limit, task.time_limit not in (None, app.conf.task_time_limit)
    meant = max(task.time_limit if own else 0, task.singleton_options.max_hold or 0)
    if soft and task.soft_time_limit in (None, soft) and meant > soft:
        yield Warning(
            f"The singleton task {task.name} may run for {meant:g} s by its own options, but the setting "
            f"task_soft_time_limit ends it after {soft:g} s.",
            hint="Give the task a soft_time_limit of its own, a little below its time_limit.",
            id="redlock.W028",
        )


def _results(task: Any) -> Iterator[CheckMessage]:
    without = "its results are ignored" if task.ignore_result else "there is no result backend"
    ignored = task.ignore_result or isinstance(task.backend, DisabledBackend)
    if ignored and task.singleton_options.overlap == "follow":
        yield Warning(
            f'on_overlap="follow" of the singleton task {task.name} needs results, and {without}.',
            hint='Store its results, or choose another way, such as on_overlap="wait".',
            id="redlock.W022",
        )


def _reach(task: Any) -> Iterator[CheckMessage]:
    """Report that with ``rpc://``, results reach only the process that sent the message."""
    options = task.singleton_options
    if not isinstance(task.backend, RPCBackend) or task.ignore_result:
        return
    asked = "" if options.scope == RUNNING or options.on_duplicate == "raise" else options.on_duplicate
    if asked or options.overlap == "follow":
        option = f'on_duplicate="{asked}"' if asked else 'on_overlap="follow"'
        yield Warning(
            f"{option} of the singleton task {task.name} needs results that all processes can read, and those of "
            "rpc:// reach only the process that sent the message: get() of a duplicate may never return.",
            hint='Choose another result backend, such as Redis or a database, or on_duplicate="raise".',
            id="redlock.W026",
        )


def _check_beat(app: Any, tasks: list[Any]) -> Iterator[CheckMessage]:
    """Report schedule entries whose task beat cannot import, and would therefore send by name."""
    if not tasks:
        return
    for name, entry in (app.conf.beat_schedule or {}).items():
        task = entry.get("task") if isinstance(entry, dict) else getattr(entry, "task", None)
        if task and task not in app.tasks:
            yield Warning(
                f"The beat schedule's entry {name!r} names the task {task}, which is not known here.",
                hint="Import its module where beat runs: a task that is sent by name alone takes no slot until a "
                "worker has it, so messages pile up.",
                id="redlock.W024",
            )
