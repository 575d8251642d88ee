"""``redlock_inspect``, ``redlock_release`` and ``redlock_top``, over real servers and with real holders."""

import builtins
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from django_redlock import Lease, lock, locks
from django_redlock.inventory import HeldLock, find_lock
from django_redlock.management.commands import redlock_release
from django_redlock.testing import Servers

from .holder import holding


@pytest.fixture(autouse=True)
def five(nodes: Servers) -> Iterator[Servers]:
    """Five real servers under the default alias."""
    options = {"restart_guard": False, "node_timeout": 1.0, "ttl": 30.0}
    urls = [{"URL": url, "NAME": f"lock-{place}"} for place, url in enumerate(nodes.urls, 1)]
    with override_settings(REDLOCK={"default": {"NODES": urls, "OPTIONS": options}}):
        yield nodes


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def run(command: str, *args: str, **options: object) -> tuple[str, str, int]:
    """Return what a command wrote to its two outputs, and its exit code."""
    out, err, code = StringIO(), StringIO(), 0
    try:
        call_command(command, *args, stdout=out, stderr=err, no_color=True, **options)
    except CommandError as error:
        err.write(str(error))
        code = error.returncode
    return out.getvalue(), err.getvalue(), code


def taken(name: str = "orders:7", **how) -> Lease:
    return lock(name, renew=False, label="nightly", **how).acquire()


def found(name: str = "orders:7") -> HeldLock:
    held = find_lock(name)
    assert held is not None
    return held


# redlock_inspect


def test_inspect_shows_each_node(five):
    """
    L71, L72: one lock with its holder, and what each node has of it: this holder, another, nothing, or no answer.
    """
    lease = taken()
    five[4].kill()
    with five[3].client() as client:
        client.delete("redlock:{orders:7}:h")
    with five[2].client() as client:
        client.set("redlock:{orders:7}:h", "somebody else", px=9000)

    out, err, code = run("redlock_inspect", "orders:7")

    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("lock-")}
    assert "split" in out
    assert "2 of 5, 3 needed" in out
    assert str(lease.fencing_token) in out
    assert "manual nightly on" in rows["lock-1"]
    assert "this holder" in rows["lock-2"]
    assert "another" in rows["lock-3"]
    assert "(another program)" in rows["lock-3"]
    assert "nothing" in rows["lock-4"]
    assert "no answer" in rows["lock-5"]
    assert "Waiting: nobody" in out
    assert "lock-5 (" in err
    assert code == 0
    assert lease.token[:8] not in out


def test_inspect_shows_who_waits(five):
    """
    L71: those who wait are shown in order.
    """
    lease = taken()
    with holding(five.urls, "orders:7") as waiter:
        while not found().waiters:
            pass
        out, _, _ = run("redlock_inspect", "orders:7")
        data = json.loads(run("redlock_inspect", "orders:7", "--format=json")[0])
        lease.release()
        waiter.hear("held")

    assert f":{waiter.process.pid} #1" in out
    assert [each["pid"] for each in data["lock"]["waiters"]] == [waiter.process.pid]
    assert (data["version"], data["known"]) == (1, True)
    assert data["lock"]["state"] in ("held", "degraded")  # a node may have been late
    assert len(data["lock"]["views"]) == 5


def test_inspect_says_what_is_stale(five):
    """
    L77: that a key is stale, and why, is said.
    """
    taken()
    for server in five:
        with server.client() as client:
            client.persist("redlock:{orders:7}:h")

    assert "Stale: it has no expiry" in run("redlock_inspect", "orders:7")[0]


def test_inspect_a_free_lock_and_too_few_nodes(five):
    """
    L73: free is exit code 1, and cannot tell is 3.
    """
    free = run("redlock_inspect", "orders:7")
    known = json.loads(run("redlock_inspect", "orders:7", "--format=json")[0])
    for server in five[:3]:
        server.kill()
    unknown = run("redlock_inspect", "orders:7")

    assert free == ("", "orders:7 is free.", 1)
    assert (known["known"], known["lock"]) == (True, None)
    assert "Too few nodes answer" in unknown[1]
    assert unknown[2] == 3


# redlock_release


def test_release_is_dry_without_a_terminal(five):
    """
    L75: without a terminal and without --no-input nothing is released.
    """
    lease = taken()

    out, _, code = run("redlock_release", "orders:7", stdin=StringIO())

    assert "orders:7: held, " in out
    assert "Dry run: 1 lock would be released. Nobody is there to ask" in out
    assert code == 0
    assert lease.extend()


def test_release_asks_and_is_logged(five, monkeypatch, caplog):
    """
    L74, L75: at a terminal it asks; the log has the name, the outcome and the reason, and not the secret.
    """
    caplog.set_level(logging.WARNING, "django_redlock")
    lease = taken()
    monkeypatch.setattr(builtins, "input", lambda question: "no")
    refused = run("redlock_release", "orders:7", stdin=Terminal())
    monkeypatch.setattr(builtins, "input", lambda question: "yes")
    done = run("redlock_release", "orders:7", "--reason=worker was killed", stdin=Terminal())

    assert refused[1:] == ("Nothing was released.", 1)
    assert done[0].endswith("orders:7: released.\n")
    assert done[2] == 0
    assert "lock released by force: orders:7 (released: worker was killed)" in caplog.text
    assert lease.token[:8] not in caplog.text + done[0]
    assert lease.extend() is False


def test_release_of_the_holder_that_was_seen_only(five):
    """
    L74: with a fingerprint nobody else's lock is released, and the exit code says so.
    """
    seen = taken()
    old = found().fingerprint
    seen.release()
    lease = taken()

    out, err, code = run("redlock_release", "orders:7", f"--fingerprint={old}", "--no-input")

    assert "Left alone: it has another holder." in out
    assert (err, code) == ("Nothing was released: the holder is another one now.", 4)
    assert lease.extend()


def test_release_of_a_lock_that_changes_hands_meanwhile(five, monkeypatch):
    """
    L74: a lock that somebody else takes while the question is on the screen is left alone; exit code 4.
    """
    seen = taken()
    leases = []
    monkeypatch.setattr(builtins, "input", lambda question: (seen.release() and leases.append(taken())) or "yes")

    out, _, code = run("redlock_release", "orders:7", stdin=Terminal())

    assert "orders:7: not released: it changed hands." in out
    assert code == 4
    assert leases[0].extend()


def test_release_several_by_a_glob(five):
    """
    L75: locks can be chosen by a glob, but not more than one can read at a time.
    """
    leases = [taken(f"orders:{number}") for number in range(3)]
    other = taken("reports:1")

    out, _, code = run("redlock_release", "--match=orders:*", "--no-input")
    many = [taken(f"many:{number}") for number in range(redlock_release.MOST + 1)]
    refused = run("redlock_release", "--match=many:*", "--no-input")

    assert (out.count(": released."), code) == (3, 0)
    assert [lease.extend() for lease in leases] == [False] * 3
    assert other.extend()
    assert "21 locks match; at most 20" in refused[1]
    assert many[0].extend()


@pytest.mark.parametrize("args", [[], ["a", "--match=*"]])
def test_release_of_what(args):
    """
    Names or a glob, one of the two.
    """
    assert run("redlock_release", *args, "--no-input")[1:] == ("Name the locks, or choose them with --match.", 1)


def test_release_of_nothing_and_without_a_quorum(five):
    """
    L73: nothing held is said with exit code 0; too few nodes with 3.
    """
    nothing = run("redlock_release", "orders:7", "--no-input")
    for server in five[:3]:
        server.kill()

    assert nothing == ("Nothing is held.\n", "", 0)
    assert run("redlock_release", "orders:7", "--no-input")[2] == 3


def test_polite_release(five):
    """
    L74: asked politely, the holder sees that it was revoked, releases by itself, and nobody got in before.
    """
    with holding(five.urls, "orders:7", {"node_timeout": 0.5}, ttl=6) as holder:
        holder.hear("held")
        out, _, code = run("redlock_release", "orders:7", "--polite=20", "--no-input")
        assert holder.hear("lost")["reason"] == "revoked"

    assert "orders:7: its holder was asked to stop." in out
    assert out.endswith("orders:7: released.\n")
    assert code == 0


def test_polite_release_of_who_does_not_listen(five):
    """
    L74: a holder that never asks loses the lock when its time is over; a lock that is no task's has none to revoke.
    """
    lease = taken()

    out, err, code = run("redlock_release", "orders:7", "--polite=0.2", "--no-input", "--revoke-task")

    assert out.endswith("orders:7: released.\n")
    assert "orders:7: not held by a Celery task." in err
    assert code == 0
    assert lease.extend() is False
    assert lease.reason == "revoked"


# redlock_top


def test_top_once(five):
    """
    One screen: the nodes in words, the number of locks in each state, the locks that end first.
    """
    leases = [taken(f"orders:{number}") for number in range(45)]
    five[0].kill()

    out, err, code = run("redlock_top", "--once")

    lines = out.splitlines()
    assert "4 of 5 nodes answer; 3 needed. 1 more may fail." in lines[0]
    assert lines[1].startswith("Trouble: lock-1 (")
    assert lines[2] == "45 degraded"
    assert lines[-1] == "... and 5 that end later"
    assert (err, code) == ("", 0)
    del leases


def test_top_goes_on_until_it_is_interrupted(five):
    """
    It is shown anew, and Ctrl-C ends it without a traceback.
    """
    code = (
        "from django.conf import settings; import django, sys;"
        f"settings.configure(INSTALLED_APPS=['django_redlock'], REDLOCK={{'default': {{'NODES': {five.urls!r}}}}});"
        "django.setup();"
        "from django.core.management import call_command;"
        "call_command('redlock_top', '--interval=0.1')"
    )
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    screens = 0
    while screens < 3:
        screens += "nodes answer" in process.stdout.readline()
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)

    assert (errors, process.returncode) == ("", 0)


def test_top_and_list_do_not_take_too_few_nodes_for_no_locks(five):
    """
    L73: while too few nodes answer nothing is known, and the commands say so and end with 3.
    """
    taken()
    for server in five[:3]:
        server.kill()

    for command in (("redlock_top", "--once"), ("redlock_list",)):
        out, _, code = run(*command)
        assert code == 3
        assert "Unknown: too few nodes answer." in out
        assert "No locks." not in out
        assert "nothing held" not in out


def test_release_goes_on_without_the_broker(five, monkeypatch):
    """
    L75: a task that cannot be revoked is told in a line; the lock is released, and the command ends with 5.
    """
    from celery import Celery, _state

    monkeypatch.setattr(_state._tls, "current_app", Celery("unreachable", broker="redis://127.0.0.1:1/0"))
    locks["default"].lock("orders:7", renew=False, kind="task", ref="id-1").acquire()

    out, err, code = run("redlock_release", "orders:7", "--revoke-task", interactive=False)

    assert code == 5
    assert "could not be told to revoke task id-1: OperationalError" in err
    assert "orders:7: released." in out
    assert find_lock("orders:7") is None


def test_release_of_a_free_lock_by_fingerprint_is_no_change(five):
    """
    L74: nobody holds it any more is not the same as somebody else does.
    """
    out, _, code = run("redlock_release", "orders:7", "--fingerprint", "0123456789ab", interactive=False)

    assert (out, code) == ("Nothing is held.\n", 0)
