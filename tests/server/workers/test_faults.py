"""Parts that fail around a run, and the calls that run all the same; see the table in docs/howto/celery-outcomes.md."""

import json
import signal
import time
from importlib.util import find_spec

import pytest

from django_redlock.testing import Server
from tests.conftest import needs
from tests.managers import wait_until

from . import project
from .real import ON_BOTH, ON_REDIS, answer, consume, free, kill, take_back, task

# The result backend


@pytest.fixture(scope="module")
def kept():
    """A server for the results of one worker, which tests take away."""
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def lonely(start, kept, results):
    """The surroundings of workers whose results are kept on that server, with messages that wait in the worker."""
    return {
        "TEST_RESULTS": kept.url,
        "TEST_STAGE": results.url,
        "TEST_PREFETCH": "8",
        "TEST_PATIENCE": "0.1",
        "TEST_SOCKET_TIMEOUT": "0.2",
        "TEST_TRACK_STARTED": "1",
    }


def state(server, task_id):
    with server.client() as client:
        stored = client.get(f"celery-task-meta-{task_id}")
    return stored and project.app.backend.decode_result(stored)["status"]


def tries(results, queue, task_id):
    """Return how often a message has been put back; it is in its queue or with a worker."""
    with results.client() as client:
        for text in [*client.lrange(queue, 0, -1), *client.hvals("unacked")]:
            if task_id in text:
                message = json.loads(text)
                message = message[0] if isinstance(message, list) else message
                ticket = message["headers"].get("django_redlock")
                return json.loads(ticket)[5] if ticket else 0  # sent by name
    return 0


@ON_REDIS
@pytest.mark.parametrize("fault", ["away", "silent"])
def test_backend_fails_while_messages_wait(start, lonely, kept, stages, what, fault):
    """Messages that have waited in a worker run while the result backend does not answer."""
    names = ["hold", "hold_late", "hold_ignored", "hold"]
    calls = [f"{what} {number}" for number in range(len(names))]
    for name, call in zip(names, calls, strict=True):
        task(name).apply_async((call,), queue=fault)
    start(fault, concurrency=1, **lonely)
    stages(calls[0]).hear("started")
    received = time.monotonic()
    inspect = project.app.control.inspect(destination=[f"{fault}@tests"], timeout=1)
    wait_until(lambda: len((inspect.reserved() or {}).get(f"{fault}@tests", ())) == len(names) - 1)
    wait_until(lambda: time.monotonic() > received + 1.5)  # longer than a message is taken for fresh

    (kept.kill if fault == "away" else kept.freeze)()
    for call in calls:
        stages(call).allow()

    for call in calls[1:]:
        stages(call).hear("started")
        stages(call).hear("ended")
    for name, call in zip(names, calls, strict=True):
        wait_until(free(name, call))
    kept.restart()


@ON_REDIS
def test_backend_is_away_when_a_message_comes_again(start, lonely, kept, results, stage, what):
    """A message that may be done is put back, and runs when the backend is there again, also under gevent."""
    needs("gevent", find_spec("gevent"), "pip install gevent")
    queue, options = "again", {"pool": "gevent", "concurrency": 1}
    worker = start(queue, **options, **lonely)
    result = task("hold_late").apply_async((what,), queue=queue)
    stage.hear("started")
    worker.kill()
    worker.wait()
    kept.kill()
    take_back(result.id)

    start(queue, **options, **lonely)
    wait_until(lambda: tries(results, queue, result.id) >= 1)
    assert stage.heard() == []
    kept.start()

    stage.hear("started")
    stage.allow()
    wait_until(lambda: state(kept, result.id) == "SUCCESS")
    assert stage.heard() == ["ended"]


# What began and did not end


@pytest.fixture(scope="module")
def stopped(worker, start, stages, broker):
    """Calls that ran when their workers were stopped, whose slots have ended, and which the broker delivers again."""
    calls = {how: f"{how} over {broker[:5]}" for how in ("SIGKILL", "SIGQUIT")}
    workers = {how: start(how, concurrency=1) for how in calls}
    found = {how: task("resume").apply_async((call,), queue=how) for how, call in calls.items()}
    for how, call in calls.items():
        stages(call).hear("started")
        workers[how].send_signal(getattr(signal, how))
    for each in workers.values():
        each.wait(timeout=90)
    if broker.startswith("redis"):
        take_back(*(result.id for result in found.values()))
    return calls, found


@ON_BOTH
@pytest.mark.parametrize("how", ["SIGKILL", "SIGQUIT"])
def test_stopped_run_finds_its_slot_taken(stopped, stages, how):
    """A message whose worker was stopped waits for the call in its slot, in spite of "drop", and then runs."""
    calls, found = stopped
    call, first = calls[how], found[how]
    wait_until(free("resume", call))
    second = task("resume").delay(call)
    assert not second.duplicate
    stages(call).hear("started")

    consume(how)
    stages(call).hear("overlapped")
    stages(call).allow()
    assert answer(second) == f"{call} done"

    stages(call).hear("started")
    stages(call).allow()
    assert answer(first) == f"{call} done"
    wait_until(free("resume", call))


# Ended before the body begins


@ON_REDIS
@pytest.mark.parametrize(
    ("name", "how"),
    [*(("slow_start", how) for how in ("time limit", "terminate", "killed child")), ("slow_receiver", "soft limit")],
)
def test_ended_before_the_body_begins(worker, stage, what, name, how):
    """A task that ends before its body begins leaves no slot behind, and the next call is no duplicate."""
    limits = {"time limit": {"time_limit": 2}, "soft limit": {"soft_time_limit": 2, "time_limit": 4}}
    result = task(name).apply_async((what,), **limits.get(how, {}))
    child = stage.hear("before")
    if how == "terminate":
        result.revoke(terminate=True)
    if how == "killed child":
        kill(child)

    if how == "soft limit":  # Celery logs what a receiver raises, and runs the task
        stage.hear("started")
        stage.allow()
    wait_until(result.ready)
    wait_until(free(name, what))
    assert "started" not in stage.heard()
