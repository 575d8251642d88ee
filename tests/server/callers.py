"""
Processes that all call at the same moment, again and again; run as ``python -m tests.server.callers ORDER``.

The order is JSON: what to call (``lock`` or ``publish``), how many callers, how many rounds, and the URLs of the nodes
and of the broker. The output is a list of the answers of each round.
"""

import json
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0  # seconds

Call = Callable[[int], Any]


def locking(number: int) -> str:
    """Try once to take the lock of a round; keep it."""
    from django_redlock import RedlockError, lock

    try:
        lock(f"round {number}", wait=0).acquire()
    except RedlockError as error:
        return type(error).__name__
    return "won"


def publishing(broker: str) -> Call:
    """Return what publishes the call of a round, and answers with its id and whether a message was sent."""
    from celery import Celery

    from django_redlock.celery import singleton_task

    app = Celery("callers", broker=broker)
    app.set_default()
    task = singleton_task(name="callers.job")(_body)

    def publish(number: int) -> tuple[str, bool]:
        result = task.delay(number)
        return result.id, result.accepted

    return publish


def _body(number: int) -> None:
    """Do nothing; no worker runs it."""


def answer(order: dict[str, Any], barrier: Any, answers: Any) -> None:
    import django
    from django.conf import settings

    redlock = {"default": {"NODES": order["nodes"], "OPTIONS": {"restart_guard": False}}}
    settings.configure(INSTALLED_APPS=["django_redlock"], DATABASES={}, REDLOCK=redlock)
    django.setup()
    call = publishing(order["broker"]) if order["what"] == "publish" else locking
    call(-1 - multiprocessing.current_process()._identity[0])  # connects, and finds the silent nodes
    for number in range(order["rounds"]):
        barrier.wait(PATIENCE)
        answers.put((number, call(number)))


def main() -> None:
    order = json.loads(sys.argv[1])
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(order["callers"]), context.SimpleQueue()
    callers = [context.Process(target=answer, args=(order, barrier, answers)) for _ in range(order["callers"])]
    for caller in callers:
        caller.start()
    rounds: list[list[Any]] = [[] for _ in range(order["rounds"])]
    for _ in range(order["rounds"] * order["callers"]):
        number, said = answers.get()
        rounds[number].append(said)
    for caller in callers:
        caller.join()
    print(json.dumps(rounds))


if __name__ == "__main__":
    main()
