"""
System checks: Celery settings with which singleton tasks do not behave as expected.

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
from celery.signals import celeryd_after_setup
from celery.utils.imports import symbol_by_name
from django.core.checks import CheckMessage, Error, Warning

from ..conf import InvalidRedlockError, aliases
from ..handler import locks
from .slots import RUNNING, WAITING
from .task import SingletonTask

REDELIVERING = ("redis", "valkey", "sentinel")  # brokers with a visibility timeout
BEATS = 3  # heartbeats that a lease must have time for; one may come late

log = logging.getLogger("django_redlock")

_importing: WeakSet[Any] = WeakSet()
"""Apps whose tasks a check is just importing."""


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
    _importing.add(app)
    try:
        app.loader.import_default_modules()
    finally:
        _importing.discard(app)
    tasks = [task for task in app.tasks.values() if isinstance(task, SingletonTask)]
    messages = [message for task in tasks for message in _check_task(app, task)]
    return messages + list(_check_beat(app, tasks))


def _check_task(app: Any, task: Any) -> Iterator[CheckMessage]:
    yield from _lease(task)
    yield from _late_ack(app, task)
    yield from _hold(app, task)
    yield from _results(task)
    yield from _reach(task)
    if not isinstance(task, _chosen(app)):
        yield Warning(
            f"The singleton task {task.name} is not of the app's own task class {_chosen(app).__name__}.",
            hint="Derive its class from app.Task too, or use @singleton_task, which does.",
            id="redlock.W023",
        )


def _lease(task: Any) -> Iterator[CheckMessage]:
    options = task.singleton_options
    try:
        rules = locks[options.using].rules
        rules.check_ttl(options.lease)
    except InvalidRedlockError:
        yield from _alias(task)
        return
    except ValueError as error:
        yield Error(f"lease={options.lease:g} of the singleton task {task.name}: {error}", id="redlock.E020")
        return
    shortest = BEATS * 2 * rules.timeout(options.lease)
    if options.lease < shortest:
        yield Warning(
            f"lease={options.lease:g} of the singleton task {task.name} leaves no time for {BEATS} heartbeats if "
            "nodes are slow.",
            hint=f"Make it {shortest:g} s or longer, or OPTIONS['node_timeout'] shorter.",
            id="redlock.W020",
        )


def _alias(task: Any) -> Iterator[CheckMessage]:
    alias = task.singleton_options.using
    with suppress(InvalidRedlockError):  # check_settings reports everything else that is wrong
        if alias not in aliases():
            known = ", ".join(map(repr, aliases()))
            yield Error(
                f"using={alias!r} of the singleton task {task.name}: REDLOCK has no such alias. It has {known}.",
                id="redlock.E021",
            )


def _late_ack(app: Any, task: Any) -> Iterator[CheckMessage]:
    if not task.acks_late or not any(str(url).startswith(REDELIVERING) for url in _brokers(app)):
        return
    visibility = (app.conf.broker_transport_options or {}).get("visibility_timeout", 3600)
    limit = task.time_limit or app.conf.task_time_limit
    if not limit or limit >= visibility:
        limited = "no time limit" if not limit else f"a time limit of {limit:g} s"
        yield Warning(
            f"The singleton task {task.name} is acknowledged late and has {limited}; after visibility_timeout, "
            f"{visibility:g} s, the broker delivers its message again while it runs.",
            hint="Set a time_limit below it. Until then " + _copy(task.singleton_options),
            id="redlock.W021",
        )


def _brokers(app: Any) -> list[Any]:
    urls = app.conf.broker_read_url or app.conf.broker_url or ""
    return urls.split(";") if isinstance(urls, str) else list(urls)


def _copy(options: Any) -> str:
    if options.scope == WAITING:
        return "the copy runs beside it: with scope='until_executing' a run has no slot."
    return "the copy waits for the run, and asks the nodes once per lease."


def _hold(app: Any, task: Any) -> Iterator[CheckMessage]:
    limit = task.time_limit or app.conf.task_time_limit
    with suppress(InvalidRedlockError):
        longest = locks[task.singleton_options.using].rules.max_hold
        if limit and limit > longest and task.singleton_options.scope != WAITING:
            yield Warning(
                f"The singleton task {task.name} may run for {limit:g} s, and its slot lasts for {longest:g} s; then "
                "a duplicate may run beside it.",
                hint="Make OPTIONS['max_hold'] as long as the time limit, or the limit shorter.",
                id="redlock.W025",
            )


def _results(task: Any) -> Iterator[CheckMessage]:
    options = task.singleton_options
    wants = [name for name, needed in _needing_results(options).items() if needed]
    without = "its results are ignored" if task.ignore_result else "there is no result backend"
    if wants and (task.ignore_result or isinstance(task.backend, DisabledBackend)):
        yield Warning(
            f"{wants[0]} of the singleton task {task.name} needs results, and {without}.",
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


def _needing_results(options: Any) -> dict[str, bool]:
    return {'on_overlap="follow"': options.overlap == "follow"}


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


def _chosen(app: Any) -> Any:
    """Return the task class that the project has chosen for its app."""
    return symbol_by_name(app.task_cls)
