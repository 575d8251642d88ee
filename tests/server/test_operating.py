"""``redlock_inspect``, ``redlock_release`` and ``redlock_top``, over real servers and with real holders."""

import builtins
import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import StringIO

import pytest
from django.test import override_settings

from django_redlock import Lease, lock
from django_redlock.inventory import ask_to_stop, find_lock, force_release, held_locks
from django_redlock.testing import Servers
from tests.held import Terminal, found, held_by, run
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def five(nodes: Servers) -> Iterator[Servers]:
    """Five real servers under the default alias; on a busy machine a late node is not a silent one."""
    options = {"restart_guard": False, "node_timeout": 7.0, "ttl": 30.0}
    urls = [{"URL": url, "NAME": f"lock-{place}"} for place, url in enumerate(nodes.urls, 1)]
    with override_settings(REDLOCK={"default": {"NODES": urls, "OPTIONS": options}}):
        yield nodes


def taken(name: str = "orders:7", **how) -> Lease:
    return lock(name, renew=False, label="nightly", **how).acquire()


# redlock_inspect


def test_inspect_shows_each_node(five):
    """One lock with its holder, and the state on each node: this holder, another, nothing, or no reply."""
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
    assert lease.secret[:8] not in out


def test_exit_code_of_inspect(five):
    """Exit code 1 means only that a lock is free, because a script may start something on it."""
    for server in five:
        with server.client() as client:
            client.set("redlock:{stale}:h", "locked by another program")
    assert "Stale: it has no expiry" in run("redlock_inspect", "stale")[0]
    assert run("redlock_inspect", "orders:7") == ("", "orders:7 is free.", 1)
    known = json.loads(run("redlock_inspect", "orders:7", "--format=json")[0])
    assert (known["known"], known["lock"]) == (True, None)
    for wrong in (("--using=typo", "orders:7"), ("",), ()):
        assert run("redlock_inspect", *wrong)[2] == 2


def test_too_few_nodes(five):
    """While too few nodes answer, nothing is known; each command says so, and exits with 3."""
    taken()
    for server in five[:3]:
        server.kill()

    for command in (("redlock_inspect", "orders:7"), ("redlock_top", "--once"), ("redlock_list",)):
        out, err, code = run(*command)
        assert ("too few nodes answer" in (out + err).lower(), code) == (True, 3)
        assert "No locks." not in out
        assert "nothing held" not in out
    assert run("redlock_release", "orders:7", "--no-input")[2] == 3


# redlock_release


def test_release_asks_and_is_logged(five, monkeypatch, caplog):
    """Without a yes nothing is released; the log has the name, the outcome and the reason, and not the secret."""

    def answer(said: str | None) -> tuple[str, str, int]:
        def ask(question: str) -> str:
            if said is None:
                raise EOFError
            return said

        monkeypatch.setattr(builtins, "input", ask)
        return run("redlock_release", "orders:7", "--reason=worker was killed", stdin=Terminal())

    caplog.set_level(logging.WARNING, "django_redlock")
    lease = taken()
    out, _, code = run("redlock_release", "orders:7", stdin=StringIO())
    assert "orders:7: held, " in out
    assert ("Dry run: 1 lock would be released. Nobody is there to ask" in out, code) == (True, 0)
    for no in ("no", None):
        assert answer(no)[1:] == ("Nothing was released.", 1)
    assert lease.extend()

    out, _, code = answer("yes")

    assert (out.endswith("orders:7: released.\n"), code) == (True, 0)
    assert "lock released by force: orders:7 (released: worker was killed)" in caplog.text
    assert lease.secret[:8] not in caplog.text + out
    assert lease.extend() is False
    assert run("redlock_release", "orders:7", "--no-input") == ("Nothing is held.\n", "", 0)


def test_release_of_the_holder_that_was_seen_only(five, monkeypatch):
    """With a fingerprint, and after a question, no other holder's lock is released; the exit code is 4."""
    seen = taken()
    old, leases = found().fingerprint, []
    monkeypatch.setattr(builtins, "input", lambda question: (seen.release() and leases.append(taken())) or "yes")

    out, _, code = run("redlock_release", "orders:7", stdin=Terminal())
    assert ("orders:7: not released: it changed hands." in out, code) == (True, 4)

    out, err, code = run("redlock_release", "orders:7", f"--fingerprint={old}", "--no-input")
    assert "Left alone: it has another holder." in out
    assert (err, code) == ("Nothing was released: the holder has changed.", 4)
    assert leases[0].extend()


def test_release_several_by_a_glob(five):
    """Locks can be chosen by names or by a glob, but not more than a person can read at a time."""
    for args, end in (([], ""), (["a", "--match=*"], " Not both.")):
        said = f"Name the locks, or choose them with --match.{end}"
        assert run("redlock_release", *args, "--no-input")[1:] == (said, 2)
    leases = [taken(f"orders:{number}") for number in range(3)]
    other = taken("reports:1")

    out, _, code = run("redlock_release", "--match=orders:*", "--no-input")
    many = [taken(f"many:{number}") for number in range(21)]
    refused = run("redlock_release", "--match=many:*", "--no-input")

    assert (out.count(": released."), code) == (3, 0)
    assert [lease.extend() for lease in leases] == [False] * 3
    assert other.extend()
    assert "21 locks match; at most 20" in refused[1]
    assert many[0].extend()


def test_polite_release_of_a_lock_that_somebody_waits_for(five):
    """A holder that releases when it is asked is a success, although the next holder, who was shown, has the lock."""
    options = {"restart_guard": False, "node_timeout": 2.0, "ttl": 10.0}  # it is renewed every three seconds
    with override_settings(REDLOCK={"default": {"NODES": five.urls, "OPTIONS": options}}):
        lease = lock("orders:7").acquire()
        lease.on_lost(lambda lease: lease.release())
        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(taken, wait=60)
            wait_until(lambda: [waiter.nodes for waiter in found().waiters] == [5])
            shown = run("redlock_inspect", "orders:7")[0]
            data = json.loads(run("redlock_inspect", "orders:7", "--format=json")[0])
            out, _, code = run("redlock_release", "orders:7", "--polite=60", "--no-input")

            assert waiter.result(60).valid()

    assert lease.reason == "revoked"
    assert "orders:7: its holder was asked to stop." in out
    assert (out.endswith("orders:7: released.\n"), code) == (True, 0)
    assert re.search(rf"1\. .*:{os.getpid()} #\d+\n", shown)
    assert [each["pid"] for each in data["lock"]["waiters"]] == [os.getpid()]
    assert (data["version"], data["known"], len(data["lock"]["views"])) == (1, True, 5)


def test_polite_release_of_a_holder_that_never_checks(five, monkeypatch):
    """
    A holder that never checks loses the lock when its time has run out; a task that cannot be revoked is reported, and
    the command then exits with 5.
    """
    from celery import Celery, _state

    lease = taken()
    out, err, code = run("redlock_release", "orders:7", "--polite=0.2", "--no-input", "--revoke-task")
    assert (out.endswith("orders:7: released.\n"), code) == (True, 0)
    assert "orders:7: not held by a Celery task." in err
    assert (lease.extend(), lease.reason) == (False, "revoked")

    monkeypatch.setattr(_state._tls, "current_app", Celery("unreachable", broker="redis://127.0.0.1:1/0"))
    held_by("orders:7", ref="id-1").acquire()
    out, err, code = run("redlock_release", "orders:7", "--revoke-task", interactive=False)
    assert ("orders:7: released." in out, code) == (True, 5)
    assert "could not be told to revoke task id-1: OperationalError" in err
    assert find_lock("orders:7") is None


# Names


def test_a_lock_with_a_limit_is_found_by_its_name(five):
    """The name of a lock with ``limit=`` stands for all its permits; the shown name of a permit for that one."""
    assert run("redlock_inspect", "sem")[2] == 1
    leases = [taken("sem", limit=3) for _ in range(2)]
    names = sorted(held.name for held in held_locks().locks)

    out, _, code = run("redlock_inspect", "sem")
    data = json.loads(run("redlock_inspect", "sem", "--format=json")[0])
    one = run("redlock_inspect", names[0])
    released = run("redlock_release", names[0], "--no-input")

    assert out.startswith("sem: 2 permits are held (#")
    assert code == 0
    assert sorted(place["name"] for place in data["places"]) == names
    assert data["lock"] in data["places"]
    assert (names[0] in one[0], names[1] in one[0], one[2]) == (True, False, 0)
    assert released[0].endswith(f"{names[0]}: released.\n")
    assert sorted(lease.extend() for lease in leases) == [False, True]
    assert found("sem").name == names[1]
    assert run("redlock_release", "sem", "--no-input")[0].endswith(f"{names[1]}: released.\n")
    assert find_lock("sem") is None


def test_a_name_that_is_shown_cut_short_is_no_free_lock(five):
    """A wrong "it is free" is worse than an error, so a shortened name is refused."""
    lease = lock("long" * 100).acquire()
    (held,) = held_locks().locks
    assert find_lock("long" * 100) is not None

    for command in ("redlock_inspect", "redlock_release", "redlock_clear"):
        args = ["--name", held.name] if command == "redlock_clear" else [held.name]
        _, err, code = run(command, *args)
        assert "write the whole name" in err
        assert code == 2
    for wrong in (find_lock, lambda name: force_release(name, held.fingerprint)):
        with pytest.raises(ValueError, match="cut short"):
            wrong(held.name)
    assert ask_to_stop(held, held.fingerprint) == "asked"
    assert lease.extend() is False
    assert run("redlock_inspect", "long" * 100)[2] == 0


# Terminals and pipes


PROJECT = """
import contextlib, os, sys, django
from django.conf import settings
nodes = {{"NODES": {urls!r}, "OPTIONS": {{"restart_guard": False, "node_timeout": 7.0}}}}
settings.configure(INSTALLED_APPS=["django_redlock"], REDLOCK={{"default": nodes}})
django.setup()
from django.core.management import execute_from_command_line
for args in {commands!r}:
    if not (pid := os.fork()):
        with contextlib.suppress(BrokenPipeError):
            os.write(1, f"{{os.getpid()}}\\n".encode())
        execute_from_command_line(["manage.py", *args])
        sys.exit()
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        sys.exit(f"{{args}} ended with {{code}}")
"""


def project(five: Servers, *commands: tuple[str, ...], stdout: int = -1, **env: str) -> subprocess.Popen[bytes]:
    """Run commands as ``manage.py`` does, one after the other, each in a process that first prints its id."""
    code = PROJECT.format(urls=five.urls, commands=commands)
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **env}, stdout=stdout, stderr=-1)


def test_what_an_output_cannot_encode_is_escaped(five):
    """A name with characters that the terminal's encoding lacks is shown escaped, and other names are not affected."""
    taken("grün")
    commands = (("redlock_list",), ("redlock_inspect", "grün"), ("redlock_release", "grün"))

    out, errors = project(five, *commands, PYTHONIOENCODING="ascii").communicate(timeout=120)

    assert [b"gr\\xfcn" in said for said in re.split(rb"^\d+\n", out, flags=re.MULTILINE)[1:]] == [True] * 3
    assert errors == b""  # which also reports if one of them failed


def test_command_ends_quietly_when_it_is_interrupted_or_its_reader_stops(five):
    """Ctrl-C, ``redlock_top | head -1`` and ``redlock_list | true`` end without a traceback."""
    top = ("redlock_top", "--interval=0.5")
    process = project(five, top, top, ("redlock_list",))
    assert process.stdout
    assert process.stderr
    pid, screens = int(process.stdout.readline()), 0
    while screens < 3:
        screens += b"nodes answer" in process.stdout.readline()

    os.kill(pid, signal.SIGINT)
    while not (line := process.stdout.readline()).strip().isdigit():
        assert line
    assert process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        errors = process.stderr.read()

    assert (process.wait(60), errors) == (0, b"")


def test_top_gives_the_terminal_its_screen_back(five):
    """Whether Ctrl-C or SIGTERM ends it, what was on the screen before is there again."""
    for number, code in ((signal.SIGINT, 0), (signal.SIGTERM, 143)):
        ours, theirs = pty.openpty()
        process = project(five, ("redlock_top", "--interval=0.5"), stdout=theirs)
        os.close(theirs)
        with open(ours, "rb", buffering=0) as terminal:
            said = b""
            while b"nodes answer" not in said:
                said += terminal.read(1024)
            os.kill(int(said.split()[0]), number)
            with suppress(OSError):  # a terminal whose programs have ended
                while more := terminal.read(1024):
                    said += more
        _, errors = process.communicate(timeout=60)

        assert said.count(b"\x1b[?1049h") == said.count(b"\x1b[?1049l") == 1
        assert (f"ended with {code}".encode() in errors) == bool(code)


def test_exit_code_does_not_depend_on_a_reader(five):
    """A pipe that nobody reads hides neither the answer of a command nor that it did not do its work."""
    taken("orders:7")
    inspect = ("redlock_inspect", "--format=json", "free")
    release = ("redlock_release", "--no-input", "orders:7")

    def said(command: tuple[str, ...], **env: str) -> list[str]:
        process = project(five, command, **env)
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        with process.stderr:
            lines = process.stderr.read().decode().splitlines()
        process.wait(60)
        return lines

    assert said(inspect, PYTHONUNBUFFERED="") == ["CommandError: free is free.", f"{inspect} ended with 1"]
    assert said(release, PYTHONUNBUFFERED="1") == [
        "CommandError: Nobody reads the output any more: nothing was released.",
        f"{release} ended with 141",
    ]
    assert find_lock("orders:7") is not None


# redlock_top


def test_top_once(five):
    """One screen: the nodes in words, the number of locks in each state, the locks that end first."""
    leases = [taken(f"orders:{number}") for number in range(45)]
    five[0].kill()

    out, err, code = run("redlock_top", "--once")

    lines = out.splitlines()
    assert "4 of 5 nodes answer; 3 needed. 1 more may fail." in lines[0]
    assert lines[1].startswith("Trouble: lock-1 (")
    assert lines[2] == "45 degraded"
    assert lines[-1] == "... and 5 that are no worse"
    assert (err, code) == ("", 0)
    del leases
