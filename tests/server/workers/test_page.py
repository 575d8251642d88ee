"""What docs/howto/celery.md says about killed processes and about chords, with real workers."""

import os
import re
import signal
from pathlib import Path

import pytest
from celery import chord
from celery.exceptions import WorkerLostError

from tests.managers import wait_until
from tests.typed import ROOT

from .real import ON_REDIS, answer, consume, free, take_back, task

pytestmark = ON_REDIS

LATE, REJECT = "`acks_late=True`", "`acks_late=True, reject_on_worker_lost=True`"


def rows() -> dict[tuple[str, str], list[str]]:
    """Return the table of the page: from what is killed and the task's options to the two answers."""
    page = (ROOT / "docs/howto/celery.md").read_text(encoding="utf-8")
    section = re.search(r"^## A worker or its child is killed$(.*?)^## ", page, re.M | re.S)
    assert section
    table, what = {}, ""
    for line in re.findall(r"^\| (.+) \|$", section[1], re.M)[2:]:
        first, options, *answers = (cell.strip() for cell in f"| {line} |"[1:-1].split(" | "))
        what = first or what
        table[what.split(",")[0], options] = answers
    return table


def processes(pid: int) -> list[int]:
    """Return a process and its children."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@pytest.fixture(scope="module", autouse=True)
def lost(worker, start, stages):
    """
    Two workers that each run an acknowledged call and one that is not; then one is killed, and one is stopped for good.

    For everybody else, a process that is stopped is like one whose machine is lost: its connections stay open.
    """
    results = {}
    for queue in ("killed", "stopped"):
        doomed = start(queue)
        for name in ("hold", "hold_late"):
            what = f"{name} of a {queue} worker"
            results[what] = task(name).apply_async((what,), queue=queue)
            stages(what).hear("started")
        if queue == "killed":
            doomed.kill()
            doomed.wait()
        else:
            stopped = processes(doomed.pid)
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            for name in ("hold", "hold_late"):
                stages(f"{name} of a {queue} worker").allow()  # which goes to the connection of the stopped process
    for queue in ("killed", "stopped"):
        consume(queue)
    yield results
    for pid in stopped[::-1]:
        os.kill(pid, signal.SIGKILL)


def test_table_of_the_page_is_complete():
    """Each row of the table is one of the tests below."""
    child, worker, machine = "the child process that runs it", "the whole worker", "the machine"

    assert {row: answers[0].partition(":")[0] for row, answers in rows().items()} == {
        (child, "none"): "no",
        (child, LATE): "no",
        (child, REJECT): "yes",
        (worker, "none"): "no",
        (worker, LATE): "yes",
        (machine, "none"): "no",
        (machine, LATE): "yes",
    }


@pytest.mark.parametrize("name", ["hold_long", "hold_long_late"])
def test_killed_child(worker, stage, what, name):
    """
    The message of a killed child is acknowledged, with and without late acknowledgement; the slot is free at once.
    """
    result = task(name).delay(what)
    os.kill(stage.hear("started"), signal.SIGKILL)

    with pytest.raises(WorkerLostError):
        answer(result)

    wait_until(free(name, what))  # of a lease of ten minutes
    again = task(name).delay(what)
    stage.hear("started")
    stage.allow()
    assert answer(again) == f"{what} done"
    assert stage.heard() == ["ended"]  # nothing ran twice


def test_killed_child_whose_message_is_rejected(worker, stage, what):
    """With ``reject_on_worker_lost`` as well, the message runs again, and has the slot until then."""
    result = task("hold_on").delay(what)
    os.kill(stage.hear("started"), signal.SIGKILL)
    assert task("hold_on").delay(what).id == result.id

    stage.hear("started")
    assert task("hold_on").delay(what).id == result.id
    stage.allow()

    assert answer(result) == f"{what} done"
    assert free("hold_on", what)()


def test_chord_with_a_duplicate(worker):
    """
    With ``on_overlap="follow"``, a chord that contains a duplicate has the value of the run twice.
    """
    price, total = task("price"), task("total")

    assert answer(chord([price.s(7), price.s(8), price.s(7)])(total.s())) == 2200


@pytest.mark.parametrize("queue", ["killed", "stopped"])
def test_lost_worker_with_early_acknowledgement(lost, stages, queue):
    """The message does not run again, and its result stays ``PENDING``. The slot is free after a lease."""
    what = f"hold of a {queue} worker"

    wait_until(free("hold", what))

    stages(what).allow()
    assert answer(task("hold").delay(what)) == f"{what} done"
    assert lost[what].state == "PENDING"
    assert stages(what).heard() == ["started", "ended"]


@pytest.mark.parametrize("queue", ["killed", "stopped"])
def test_lost_worker_with_late_acknowledgement(lost, stages, queue):
    """The slot is free after a lease, and the message runs again when the broker delivers it again."""
    what = f"hold_late of a {queue} worker"
    wait_until(free("hold_late", what))

    take_back(lost[what].id)  # the visibility timeout has passed

    stages(what).hear("started")
    stages(what).allow()

    assert answer(lost[what]) == f"{what} done"
    assert stages(what).heard() == ["ended"]
