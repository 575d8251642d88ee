"""Singleton tasks of Django's with real workers: calls at the same moment, transactions, workers that are killed."""

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import pytest

from tests.managers import real_manager, wait_until

from .conftest import Shop, begun
from .project import LEASE


def runs_of(shop: Shop, what: str, count: int = 1) -> list[tuple[float, float, str]]:
    """Wait until so many runs have ended; return when each began and ended, and its row, in their order."""
    ended = wait_until(lambda: len(found := shop.notes(what, "ended")) >= count and found)
    began = {(row, pid): float(at) for row, at, pid in shop.notes(what, "began")}
    return sorted((began[row, pid], float(at), row) for row, at, pid in ended)


def printed(process: subprocess.Popen[bytes]) -> Any:
    """Return what a process prints last, which is JSON."""
    return json.loads(process.communicate(timeout=120)[0].splitlines()[-1])


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


def test_hundred_calls_of_four_processes_are_one_row(shop):
    """Whatever process calls, all of them get the same id, and the body runs once."""
    code = "print(json.dumps([str(once.enqueue('a').id) for _ in range(25)]))"
    callers = [shop.start_code(code, stdout=subprocess.PIPE) for _ in range(4)]

    ids = {each for caller in callers for each in printed(caller)}
    shop.worker()

    assert len(ids) == 1
    assert [row for *_, row in runs_of(shop, "a")] == list(ids)
    if "db" in shop.env["TEST_BACKEND"]:
        count = "from django_tasks_db.models import DBTaskResult; print(DBTaskResult.objects.count())"
        assert shop.run(count) == 1


def test_each_accepted_row_runs_once_and_never_two_at_once(shop):
    """While two workers run, callers go on calling: what was accepted runs once, and what was not names a row."""
    workers = [shop.worker() for _ in range(2)]
    code = (
        "import random; found = []\n"
        "for _ in range(40):\n"
        "    result = once.enqueue('a'); found.append([str(result.id), result.accepted])\n"
        "    time.sleep(random.random() / 20)\n"
        "print(json.dumps(found))"
    )
    callers = [shop.start_code(code, stdout=subprocess.PIPE) for _ in range(3)]
    answers = [tuple(each) for caller in callers for each in printed(caller)]

    accepted = [row for row, was in answers if was]
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
    wait_until(lambda: shop.run("print(json.dumps(find_lock(serial.singleton.key('a', 0)).waiting))"))

    assert len(shop.notes("a", "began")) == 1
    shop.go("a")

    runs = runs_of(shop, "a", 2)
    assert sorted(row for *_, row in runs) == sorted(ids)
    assert all(one[1] <= other[0] for one, other in pairwise(runs))


def test_killed_worker(rows, nodes):
    """Its slot is free within a lease and a second. The reaper puts its row back: the same id runs once more."""
    first = rows.worker()
    task_id = rows.run("print(json.dumps(str(long.enqueue('a').id)))")
    slot = real_manager(nodes.urls[:3], "redlock:").lock(
        rows.run("print(json.dumps(long.singleton.key('a')))"), wait=60
    )
    begun(rows, "a")
    first.send_signal(signal.SIGKILL)
    killed = time.monotonic()

    slot.acquire().release()
    free = time.monotonic() - killed
    assert rows.row(task_id) == ("RUNNING", 1)
    rows.reaper()
    rows.worker()
    [_, (again, *_)] = begun(rows, "a", 2)
    rows.go("a")

    assert free <= LEASE + 1
    assert again == task_id
    wait_until(lambda: rows.row(task_id) == ("SUCCESSFUL", 2))
    assert len(rows.notes("a", "began")) == 2


def test_reaper_that_finds_nothing_says_so(rows):
    """Silence would look like a command that did nothing."""
    code = (
        "from io import StringIO; from django.core.management import call_command\n"
        "call_command('redlock_reap_tasks', stdout=(out := StringIO())); print(json.dumps(out.getvalue()))"
    )

    assert rows.run(code) == "No row of a dead worker.\n"


def test_row_without_a_slot_is_not_reaped_while_its_process_lives(rows):
    """One that has waited for its slot for longer than a lease, and two that have lost it because of ``max_hold``."""
    for _ in range(4):
        rows.worker()
    rows.run("print(json.dumps([str(serial.enqueue('a', number).id) for number in range(2)]))")
    rows.run("print(json.dumps([str(bounded.enqueue('b').id), str(watchful.enqueue('c').id)]))")
    for what in "abc":
        begun(rows, what)
    wait = "from django_tasks_db.models import DBTaskResult\nwhile DBTaskResult.objects.running().count() < 4: pass\n"

    assert rows.run(wait + looks(2 * LEASE)) == []
    for what in "abc":
        rows.go(what)
    runs_of(rows, "a", 2)
    runs_of(rows, "b")
    runs_of(rows, "c")


def test_row_is_not_reaped_after_an_outage_of_the_nodes(rows, nodes):
    """It has lost its slot, or the lock with which it waits for one, and shows again that its process lives."""
    for _ in range(2):
        rows.worker()
    rows.run("print(json.dumps([str(serial.enqueue('a', number).id) for number in range(2)]))")
    begun(rows, "a")
    wait_until(lambda: rows.run("print(json.dumps(find_lock(serial.singleton.key('a', 0)).waiting))"))
    for node in nodes:
        node.freeze()
    time.sleep(2 * LEASE)
    for node in nodes:
        node.thaw()

    assert rows.run(looks(2 * LEASE)) == []
    rows.go("a")
    runs_of(rows, "a", 2)


def test_row_is_not_reaped_after_a_restart_of_the_nodes(rows, nodes):
    """They answer, and have forgotten its slot; as long as they give no vote, nobody can show that it lives."""
    rows.env["TEST_GUARD"] = "1"
    rows.worker()
    rows.run("print(json.dumps(str(versioned.enqueue('a').id)))")
    begun(rows, "a")
    time.sleep(LEASE)
    for node in nodes:
        node.restart()

    assert rows.run(looks(3 * LEASE)) == []
    rows.go("a")
    runs_of(rows, "a")


def test_row_is_not_reaped_while_its_worker_writes_the_outcome(rows):
    """The body is over and the slot free, but another transaction keeps the worker from saying so."""
    rows.worker()
    task_id = rows.run("print(json.dumps(str(long.enqueue('a').id)))")
    begun(rows, "a")
    time.sleep(LEASE)
    code = "from django.db import transaction\nwith transaction.atomic(): print('[]', flush=True); until_told('b')"
    locked = rows.start_code(code, stdout=subprocess.PIPE)
    locked.stdout.readline()
    rows.go("a")
    runs_of(rows, "a")

    assert rows.run(looks(2 * LEASE)) == []
    rows.go("b")
    locked.communicate(timeout=60)
    wait_until(lambda: rows.row(task_id) == ("SUCCESSFUL", 1))
    wait_until(lambda: rows.run(f"print(json.dumps(find_lock('alive:{task_id}') is None))"))


def test_row_is_not_reaped_after_a_deploy_that_changed_its_key(rows):
    """Its run still has the slot of the old name, while the reaper knows the new one."""
    rows.worker()
    rows.run("print(json.dumps(str(versioned.enqueue('a').id)))")
    begun(rows, "a")
    time.sleep(LEASE)
    rows.env["TEST_VERSION"] = "2"

    assert rows.run(looks(LEASE)) == []
    rows.go("a")
    runs_of(rows, "a")


def test_row_whose_function_has_moved_hinders_no_call(rows):
    """A row that no worker can run any more does not keep the slot, which a group keeps when its function moves."""
    code = (
        "from django_tasks_db.models import DBTaskResult\n"
        "first = once.enqueue('a'); locks['default'].confirmations.send(float('inf'))\n"
        "DBTaskResult.objects.update(task_path='tests.server.tasks.gone.once')\n"
        "print(json.dumps(once.enqueue('a').accepted))"
    )

    assert rows.run(code) is True


def test_reaper_refuses_another_backend(make):
    """It says which backends it can look at, instead of finding nothing for ever."""
    shop = make("rq")
    reaper = shop.start("-m", "django", "redlock_reap_tasks")

    assert reaper.wait(60) == 2


def test_row_that_no_longer_fits_its_task_hinders_no_other(rows):
    """After a deploy, the arguments of an old row may have no key; the reaper then acts on the others."""
    code = (
        "from datetime import timedelta; from django.utils import timezone\n"
        "from django_redlock.tasks import reaper; from django_tasks_db.models import DBTaskResult\n"
        "ids = [str(long.enqueue(what).id) for what in 'ab']\n"
        "long.singleton.release('b'); old = timezone.now() - timedelta(hours=1)\n"
        "DBTaskResult.objects.update(status='RUNNING', started_at=old, worker_ids=['dead'])\n"
        "DBTaskResult.objects.filter(id=ids[0]).update(args_kwargs={'args': [], 'kwargs': {'gone': 1}})\n"
        "found = reaper.Reaper('default'); seen = [*found.look()]\n"
        "time.sleep(reaper.APART); seen += found.look()\n"
        "print(json.dumps([ids[1], [[each.task_id, each.outcome] for each in seen]]))"
    )
    other, seen = rows.run(code)

    assert seen == [[other, "put back"]]


def test_second_death_fails_the_row(rows):
    """A row that has cost two workers their lives is not tried again; its result says why."""
    task_id = rows.run("print(json.dumps(str(long.enqueue('a').id)))")
    rows.reaper()
    for number in (1, 2):
        worker = rows.worker()
        begun(rows, "a", number)
        worker.send_signal(signal.SIGKILL)
        worker.wait()

    wait_until(lambda: rows.row(task_id)[0] == "FAILED")

    code = (
        f"result = long.get_backend().get_result({task_id!r}); print(json.dumps(result.errors[0].exception_class_path))"
    )
    assert rows.run(code) == "django_redlock.tasks.reaper.WorkerDied"
    assert len(rows.notes("a", "began")) == 2


def test_rolled_back_call(rows):
    """Nobody is told of a row that was rolled back. Another call has a row of its own, and no slot is left for long."""
    code = (
        "from django.db import transaction\n"
        "try:\n"
        "    with transaction.atomic(): lost = once.enqueue('a'); raise ZeroDivisionError\n"
        "except ZeroDivisionError: pass\n"
        "left = once.singleton.holder('a').ttl; result = once.enqueue('a')\n"
        "print(json.dumps([left, result.id == lost.id, result.duplicate, result.accepted, str(result.id)]))"
    )
    left, same, *answer, task_id = rows.run(code)

    assert left <= 10.0
    assert (same, answer) == (False, [False, True])
    rows.worker()
    assert [row for *_, row in runs_of(rows, "a")] == [task_id]


def test_calls_of_a_transaction_that_is_tried_again(rows):
    """The first takes over the slot of the call that was rolled back, so the others join it."""
    code = (
        "from django.db import transaction\n"
        "try:\n"
        "    with transaction.atomic(): once.enqueue('a'); raise ZeroDivisionError\n"
        "except ZeroDivisionError: pass\n"
        "with transaction.atomic(): found = [once.enqueue('a') for _ in range(3)]\n"
        "print(json.dumps([[str(each.id) for each in found], [each.accepted for each in found]]))"
    )
    ids, accepted = rows.run(code)

    assert len({*ids}) == 1
    assert accepted == [True, False, False]


def test_calls_in_a_transaction(rows):
    """The second call of a transaction joins the first, and the slot names the row as soon as workers can see it."""
    code = (
        "from django.db import transaction; seen = []\n"
        "with transaction.atomic():\n"
        "    first = once.enqueue('a'); second = once.enqueue('a')\n"
        "    seen.append(once.singleton.holder('a').id)\n"
        "    transaction.on_commit(lambda: seen.append(str(once.enqueue('b').id)))\n"
        "until = time.time() + 60\n"
        "while once.singleton.holder('a').id != first.id and time.time() < until: time.sleep(.01)\n"
        "third = once.enqueue('a')\n"
        "answers = [second.id == first.id, second.duplicate, third.id == first.id, third.duplicate]\n"
        "print(json.dumps([answers, seen, str(first.id)]))"
    )
    answers, (during, later), task_id = rows.run(code)
    rows.worker()

    assert answers == [True, True, True, True]
    assert during is None
    assert [row for *_, row in runs_of(rows, "a")] == [task_id]
    assert [row for *_, row in runs_of(rows, "b")] == [later]


def test_slot_of_a_row_that_is_gone(shop):
    """Rows that somebody has deleted keep no call from being stored."""
    code = (
        "first = once.enqueue('a'); locks['default'].confirmations.send(float('inf'))\n"
        "if os.environ['TEST_BACKEND'] == 'db':\n"
        "    from django_tasks_db.models import DBTaskResult; DBTaskResult.objects.all().delete()\n"
        "else:\n"
        "    import django_rq; django_rq.get_connection().flushall()\n"
        "second = once.enqueue('a'); print(json.dumps([second.duplicate, str(second.id)]))"
    )
    duplicate, task_id = shop.run(code)
    shop.worker()

    assert not duplicate
    assert [row for *_, row in runs_of(shop, "a")] == [task_id]


def test_functions_of_all_kinds(shop):
    """Plain functions and coroutine functions run under their slot, and can be enqueued by a coroutine."""
    code = (
        "import asyncio\n"
        "async def call(): return [(await coroutine.aenqueue('a')).duplicate for _ in range(2)]\n"
        "answers = asyncio.run(call()); plain.enqueue('b', more=(1, 2)); print(json.dumps(answers))"
    )

    assert shop.run(code) == [False, True]
    shop.worker()
    assert begun(shop, "a") == [["True"]]
    assert begun(shop, "b") == [["True", "[1,", "2]"]]


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


@pytest.mark.parametrize("module", ["tasks", "tasks.reaper"])
def test_needs_no_celery(module):
    """A project without Celery can use them."""
    code = f"import sys; sys.modules['celery'] = sys.modules['kombu'] = None; import django_redlock.{module}"
    code = f"from django.conf import settings; settings.configure(); {code}"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
