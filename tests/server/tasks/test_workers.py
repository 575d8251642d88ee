"""Singleton tasks of Django's with real workers: calls at the same moment, transactions, workers that are killed."""

import os
import shutil
import signal
import time
from itertools import pairwise

from tests.managers import real_manager, wait_until

from .conftest import Shop, begun, printed
from .project import LEASE

DEAD_ROWS = (
    "import uuid; from datetime import timedelta; from io import StringIO; from django.utils import timezone\n"
    "from django.core.management import CommandError, call_command; from django_tasks_db.models import DBTaskResult\n"
    "[long.singleton.release(what) for what in 'ab']; old = timezone.now() - timedelta(hours=1)\n"
    "DBTaskResult.objects.update(status='RUNNING', started_at=old, worker_ids=['dead'])\n"
)
APART = 3.0  # seconds, at least, between the looks of the reaper that find a row abandoned


def runs_of(shop: Shop, what: str, count: int = 1) -> list[tuple[float, float, str]]:
    """Wait until so many runs have ended; return when each began and ended, and its row, in their order."""
    ended = wait_until(lambda: len(found := shop.notes(what, "ended")) >= count and found)
    began = {(row, pid): float(at) for row, at, pid in shop.notes(what, "began")}
    return sorted((began[row, pid], float(at), row) for row, at, pid in ended)


def looks(seconds: float) -> str:
    """Return code that looks for rows of dead workers for some seconds, and prints what would happen to them."""
    return (
        "from django_redlock.tasks.reaper import QuorumUnavailableError, Reaper\n"
        f"reaper, until, found = Reaper('default', act=False), time.time() + {seconds}, []\n"
        "while time.time() < until:\n"
        "    try: found += reaper.look()\n"
        "    except QuorumUnavailableError: pass\n"
        "    time.sleep(.2)\n"
        "print(json.dumps(found))"
    )


def test_calls_of_several_processes(shop):
    """All calls before a run get the id of its row; while runs follow each other, each call runs or names a row."""
    code = "print(json.dumps([str(once.enqueue('a').id) for _ in range(25)]))"
    ids = {each for caller in [shop.call(code) for _ in range(4)] for each in printed(caller)}
    workers = [shop.worker() for _ in range(2)]
    assert [row for *_, row in runs_of(shop, "a")] == list(ids)

    code = (
        "import random; found = []\n"
        "for _ in range(40):\n"
        "    result = once.enqueue('a'); found.append([str(result.id), result.accepted])\n"
        "    time.sleep(random.random() / 20)\n"
        "print(json.dumps(found))"
    )
    answers = [tuple(each) for caller in [shop.call(code) for _ in range(3)] for each in printed(caller)]
    accepted = [*ids, *(row for row, was in answers if was)]
    runs = runs_of(shop, "a", len(accepted))

    assert {row for row, was in answers if not was} <= {*accepted}
    assert sorted(row for *_, row in runs) == sorted(accepted)
    assert all(one[1] <= other[0] for one, other in pairwise(runs))
    assert [worker.poll() for worker in workers] == [None, None]


def test_row_whose_slot_another_run_has_waits_in_its_worker(shop):
    """Serial rows of one key run one after the other; the worker of the second is busy, but not dead."""
    for _ in range(2):
        shop.worker()
    ids = shop.run("print(json.dumps([str(serial.enqueue('a', number).id) for number in range(2)]))")
    begun(shop, "a")
    shop.run("while not find_lock(serial.singleton.key('a', 0)).waiting: time.sleep(.01)\nprint(0)")

    assert len(shop.notes("a", "began")) == 1
    shop.go("a")

    runs = runs_of(shop, "a", 2)
    assert sorted(row for *_, row in runs) == sorted(ids)
    assert all(one[1] <= other[0] for one, other in pairwise(runs))


def test_limit(shop):
    """With ``limit=2``, two rows of one key run at once; the worker of the third waits until one of them ends."""
    for _ in range(3):
        shop.worker()
    ids = shop.run("print(json.dumps([str(two_at_once.enqueue('a', number).id) for number in range(3)]))")
    begun(shop, "a", 2)
    shop.run("while not find_lock(two_at_once.singleton.key('a', 0)).waiting: time.sleep(.01)\nprint(0)")

    assert len(shop.notes("a", "began")) == 2
    shop.go("a")

    runs = runs_of(shop, "a", 3)
    assert sorted(row for *_, row in runs) == sorted(ids)
    assert min(ended for _, ended, _ in runs) <= runs[2][0]


def test_killed_workers(rows, nodes):
    """
    The slot of a killed worker is free within a lease and a second. The reaper puts its row back: the same id runs once
    more. A row that has cost two workers their lives is not tried again; its result says why.
    """
    workers = [rows.worker() for _ in range(2)]
    ids = dict(zip("ab", rows.run("print(json.dumps([str(long.enqueue(what).id) for what in 'ab']))"), strict=True))
    slot = real_manager(nodes.urls[:3], "redlock:").lock(
        rows.run("print(json.dumps(long.singleton.key('a')))"), wait=60
    )
    for what in ids:
        begun(rows, what)
    for worker in workers:
        worker.send_signal(signal.SIGKILL)
    killed = time.monotonic()

    slot.acquire().release()
    free = time.monotonic() - killed
    assert rows.row(ids["a"]) == ("RUNNING", 1)
    rows.reaper()
    workers = [rows.worker() for _ in range(2)]
    again = {what: begun(rows, what, 2)[1] for what in ids}
    rows.go("a")
    os.kill(int(again["b"][2]), signal.SIGKILL)

    assert free <= LEASE + 1
    assert {what: row for what, (row, *_) in again.items()} == ids
    wait_until(lambda: rows.row(ids["a"]) == ("SUCCESSFUL", 2))
    wait_until(lambda: rows.row(ids["b"])[0] == "FAILED")
    error = f"long.get_backend().get_result({ids['b']!r}).errors[0].exception_class_path"
    assert rows.run(f"print(json.dumps({error}))") == "django_redlock.tasks.reaper.WorkerDied"
    assert [len(rows.notes(what, "began")) for what in ids] == [2, 2]


def test_row_is_not_reaped_while_its_process_lives(rows, nodes):
    """A row without a slot that the reaper knows is left alone, also after an outage of the nodes."""
    for _ in range(5):
        rows.worker()
    rows.run("print(json.dumps([str(serial.enqueue('a', number).id) for number in range(2)]))")
    rows.run("[bounded.enqueue('b'), watchful.enqueue('c'), versioned.enqueue('d')]; print('0')")
    for what in "abcd":
        begun(rows, what)
    rows.env["TEST_VERSION"] = "2"
    running = (
        "from django_tasks_db.models import DBTaskResult\nwhile DBTaskResult.objects.running().count() < 5: pass\n"
    )
    rows.run(running + "print('[]')")
    for node in nodes:
        node.freeze()
    time.sleep(LEASE + 1)
    for node in nodes:
        node.thaw()

    assert rows.run(looks(APART + 2)) == []
    for what, runs in {"a": 2, "b": 1, "c": 1, "d": 1}.items():
        rows.go(what)
        runs_of(rows, what, runs)


def test_row_is_not_reaped_after_a_restart_of_the_nodes(rows, nodes):
    """They answer, and have forgotten its slot; as long as they give no vote, nobody can show that it lives."""
    rows.env["TEST_GUARD"] = "1"
    rows.worker()
    rows.run("print(json.dumps(str(versioned.enqueue('a').id)))")
    begun(rows, "a")
    for node in nodes:
        node.restart()

    assert rows.run(looks(7 + APART + 2)) == []  # they vote again after six seconds and a little
    rows.go("a")
    runs_of(rows, "a")


def test_row_is_not_reaped_while_its_worker_writes_the_outcome(rows):
    """The body is over and the slot free, but another transaction keeps the worker from saying so."""
    rows.worker()
    task_id = rows.run("print(json.dumps(str(long.enqueue('a').id)))")
    begun(rows, "a")
    code = "from django.db import transaction\nwith transaction.atomic(): print('[]', flush=True); until_told('b')"
    locked = rows.call(code)
    locked.stdout.readline()
    rows.go("a")
    runs_of(rows, "a")

    assert rows.run(looks(LEASE + APART + 1)) == []  # none is looked at before it is as old as a lease
    rows.go("b")
    locked.communicate(timeout=60)
    wait_until(lambda: rows.row(task_id) == ("SUCCESSFUL", 1))
    rows.run(f"while find_lock('alive:{task_id}'): time.sleep(.1)\nprint('0')")


def test_row_that_no_longer_fits_its_task_hinders_no_other(rows):
    """
    After a deploy, the arguments of an old row may have no key; the reaper then acts on all others.

    So it does after an error of a receiver.
    """
    code = (
        "from django.tasks.signals import task_finished\n"
        "task_finished.connect(lambda **about: 1 / 0, weak=False)\n"
        "from datetime import timedelta; from django.utils import timezone\n"
        "from django_redlock.tasks import reaper; from django_tasks_db.models import DBTaskResult\n"
        "ids = [str(long.enqueue(what).id) for what in 'abc']\n"
        "[long.singleton.release(what) for what in 'bc']; old = timezone.now() - timedelta(hours=1)\n"
        "DBTaskResult.objects.update(status='RUNNING', started_at=old, worker_ids=['dead'])\n"
        "DBTaskResult.objects.filter(id=ids[0]).update(args_kwargs={'args': [], 'kwargs': {'gone': 1}})\n"
        "DBTaskResult.objects.filter(id=ids[2]).update(worker_ids=[])\n"
        "found = reaper.Reaper('default', fail=True); seen = [*found.look()]\n"
        "time.sleep(reaper.APART); seen += found.look()\n"
        "from io import StringIO; from django.core.management import call_command\n"
        "call_command('redlock_reap_tasks', stdout=(out := StringIO()))\n"
        "print(json.dumps([ids[1:], [[each.task_id, each.worker, each.outcome] for each in seen], out.getvalue()]))"
    )
    others, seen, said = rows.run(code)

    assert sorted(seen) == sorted([row, who, "failed"] for row, who in zip(others, ("dead", "unknown"), strict=True))
    assert said == "No row of a dead worker.\n"


def test_rows_are_read_where_they_are_written(rows, tmp_path):
    """A replica to which a router sends reads does not have them yet: calls join them, and the reaper finds them."""
    rows.env["TEST_REPLICA"] = shutil.copy(rows.env["TEST_DATABASE"], tmp_path / "replica.sqlite3")
    code = (
        "from django.db import transaction\n"
        "one = [long.enqueue('a')]; locks['default'].confirmations.send(float('inf')); one += [long.enqueue('a')]\n"
        "with transaction.atomic(): other = [long.enqueue('b') for _ in range(3)]\n"
        "print(json.dumps([len({each.id for each in found}) for found in (one, other)]))"
    )
    assert rows.run(code) == [1, 1]

    code = (
        f"{DEAD_ROWS}from django.db import OperationalError; set_failed, refused = DBTaskResult.set_failed, []\n"
        "def once_refused(row, error):\n"
        "    if not refused: refused.append(str(row.id)); raise OperationalError('no space')\n"
        "    set_failed(row, error)\n"
        "DBTaskResult.set_failed, out = once_refused, StringIO()\n"
        "try: call_command('redlock_reap_tasks', fail=True, stdout=out)\n"
        "except CommandError as error: said = [str(error), error.returncode]\n"
        "states = dict(DBTaskResult.objects.using('default').values_list('id', 'status'))\n"
        "print(json.dumps([said, states.pop(uuid.UUID(refused[0])), [*states.values()], out.getvalue()]))"
    )
    said, refused, other, out = rows.run(code)

    assert (said, refused, other) == (["no space", 1], "RUNNING", ["FAILED"])
    assert sorted(line.rpartition(": ")[2] for line in out.splitlines()) == ["failed", "the database has refused it"]


def test_rolled_back_call(rows):
    """A transaction that is tried again takes over the slot of its rolled-back call, and all its calls are one row."""
    code = (
        "from django.db import transaction\n"
        "try:\n"
        "    with transaction.atomic(): lost = once.enqueue('a'); raise ZeroDivisionError\n"
        "except ZeroDivisionError: pass\n"
        "left = once.singleton.holder('a').ttl\n"
        "with transaction.atomic(): found = [once.enqueue('a') for _ in range(3)]\n"
        "about = [[str(each.id), each.id == lost.id, each.accepted] for each in found]\n"
        "print(json.dumps([left, about]))"
    )
    left, answers = rows.run(code)
    task_id = answers[0][0]

    assert left <= 10.0
    assert answers == [[task_id, False, accepted] for accepted in (True, False, False)]
    rows.worker()
    assert [row for *_, row in runs_of(rows, "a")] == [task_id]


def test_module_that_is_imported_under_two_names(rows, tmp_path):
    """Each name is a task of its own. With ``group``, both share the slots."""
    source = (
        "from django_redlock.tasks import singleton_task\n"
        "from tests.server.tasks.project import note\n"
        "@singleton_task(group='twice')\n"
        "def twice(what): note(what, f'began {__name__}')\n"
        "@singleton_task\n"
        "def alone(what): note(what, f'began {__name__}')\n"
    )
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "jobs.py").write_text(source)
    rows.env["PYTHONPATH"] += f":{tmp_path}:{tmp_path / 'inner'}"
    code = (
        "import jobs, inner.jobs\n"
        "shared = [jobs.twice.enqueue('a').duplicate, inner.jobs.twice.enqueue('a').duplicate]\n"
        "print(json.dumps([*shared, jobs.alone.enqueue('b').duplicate, inner.jobs.alone.enqueue('b').duplicate]))"
    )

    assert rows.run(code) == [False, True, False, False]
    rows.worker()
    assert begun(rows, "a") == [["jobs"]]
    assert sorted(begun(rows, "b", 2)) == [["inner.jobs"], ["jobs"]]


def test_row_that_a_task_stores_last(shop):
    """Its slot names it, also if the worker ends the process of each task at once."""
    shop.worker()
    shop.run("parent.enqueue('a'); print('0')")
    [[child]] = wait_until(lambda: shop.notes("a", "stored"))
    code = "found = once.singleton.holder('a child'); print(json.dumps([found.id, str(found.state)]))"

    assert wait_until(lambda: (seen := shop.run(code))[0] and seen) == [child, "queued"]


def test_only_task_of_a_project_that_is_imported_early(make, tmp_path):
    """An app that imports its one task when Django starts does so before anything has imported the worker's package."""
    shop = make("rq")
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "__init__.py").touch()
    (tmp_path / "early" / "apps.py").write_text(
        "from django.apps import AppConfig\n"
        "class Early(AppConfig):\n"
        "    name = 'early'\n"
        "    def ready(self): import early.tasks\n"
    )
    (tmp_path / "early" / "tasks.py").write_text(
        "from pathlib import Path; import os\n"
        "from django_redlock.tasks import singleton_task\n"
        "@singleton_task(scope='while_executing')\n"
        "def alone(what):\n"
        "    Path(os.environ['TEST_NOTES'], what).write_text(f'ended {alone.singleton.lease is not None}\\n')\n"
    )
    (tmp_path / "early_settings.py").write_text(
        "from tests.server.tasks.task_settings import *\nINSTALLED_APPS = [*INSTALLED_APPS, 'early']\n"
    )
    shop.env |= {"PYTHONPATH": f"{shop.env['PYTHONPATH']}:{tmp_path}", "DJANGO_SETTINGS_MODULE": "early_settings"}
    shop.worker()
    shop.run("from early.tasks import alone; alone.enqueue('a'); print('0')")

    assert wait_until(lambda: shop.notes("a", "ended")) == [["True"]]
