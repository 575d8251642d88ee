"""What RabbitMQ does that a Redis broker does not."""

import json
import time

from django_redlock.inventory import find_lock
from tests.managers import wait_until

from . import project
from .conftest import hang_up
from .real import ON_RABBITMQ, answer, free, task, watching

pytestmark = ON_RABBITMQ


def test_headers(worker, stage, what):
    """Headers of the caller, also nested ones, arrive beside ours, at the first attempt and at a retry."""
    headers = {"flat": "red", "nested": {"list": [1, "2"], "more": {"deep": True}}}

    task("show_headers").apply_async((what,), headers=headers)

    wait_until(lambda: len(stage.heard()) == 2)
    seen = [json.loads(each) for each in stage.heard()]
    assert [{name: attempt[name] for name in headers} for attempt in seen] == [headers] * 2
    wait_until(free("show_headers", what))


def test_expired_in_the_broker(broker, what):
    """A message that expires in the queue is dropped by RabbitMQ without a notice, and its slot has ended by then."""
    with project.app.connection_for_write() as connection:
        connection.default_channel.queue_declare("nobody", durable=True, auto_delete=False)
    start = time.monotonic()
    result = task("double").apply_async((what,), queue="nobody", expires=1)
    lasting = task("double").apply_async((f"{what} later",), queue="nobody", expires=300)

    assert task("double").apply_async((f"{what} later",), queue="nobody").id == lasting.id
    wait_until(free("double", what))
    assert time.monotonic() - start > 0.9
    with project.app.connection_for_read() as connection:
        wait_until(lambda: connection.default_channel.queue_declare("nobody", passive=True).message_count == 1)
    assert result.state == "PENDING"


def test_broker_that_crashes_while_a_body_runs(start, rabbitmq_server, stage, what):
    """When RabbitMQ crashes and comes back it delivers again what runs; the copy waits, and does not run."""
    start("crash")
    result = task("hold_late").apply_async((what,), queue="crash")
    stage.hear("started")

    rabbitmq_server.kill()
    hang_up()
    rabbitmq_server.start()

    wait_until(lambda: watching(result.id))
    assert stage.heard() == []
    stage.allow()
    assert answer(result) == f"{what} done"
    wait_until(free("hold_late", what))
    assert stage.heard() == ["ended"]


def test_put_back_to_a_quorum_queue(start, stage, what):
    """Calls of one key run in their order, though RabbitMQ delays their messages itself, by whole seconds."""
    start("quorum", concurrency=3, TEST_QUORUM="1")
    found = [task("turn").apply_async((what, 0), queue=project.QUORUM)]
    stage.hear("0 began")
    for number in (1, 2, 3):
        found.append(task("turn").apply_async((what, number), queue=project.QUORUM))
        wait_until(lambda: find_lock(task("turn").singleton.key(what, 0)).waiting == len(found) - 1)

    for _ in found:
        stage.allow()

    assert [answer(result) for result in found] == [0, 1, 2, 3]
    assert stage.heard() == ["1 began", "2 began", "3 began"]
