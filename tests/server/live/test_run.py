"""``redlock_run`` and ``locked_command`` in processes of their own, over real servers, with real signals and kills."""

import ctypes
import operator
import os
import pty
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from django_redlock import LockManager, LockTakenError, locks
from django_redlock.management import process_group
from django_redlock.management.commands import redlock_run
from django_redlock.management.process_group import Child, passed_on
from django_redlock.testing import Servers
from django_redlock.testing.servers import spawn
from tests.conftest import needs
from tests.services import ended
from tests.shop.helpers import is_free
from tests.waiting import wait_until

from .conftest import CHECKOUT, PATIENCE, outcome, said

WORK = """
import os, signal, subprocess, sys, time
def say(text): print(text, flush=True)
"""
STUBBORN = f"{WORK}signal.signal(signal.SIGTERM, signal.SIG_IGN); say(os.getpid()); time.sleep({PATIENCE})"
FAMILY = f"{WORK}subprocess.Popen([sys.executable, '-c', sys.argv[1]]); say(os.getpid()); time.sleep({PATIENCE})"
# Blocked signals wait. A handler would run only after the sleep if its signal came just before the sleep.
LISTENING = f"""{WORK}
heeded = {{signal.Signals[name] for name in sys.argv[1:]}}
signal.pthread_sigmask(signal.SIG_BLOCK, heeded)
say("ready")
for _ in heeded:
    say(signal.Signals(signal.sigwait(heeded)).name)
sys.exit(9)
"""

# The shell's part at a terminal: its first argument says whether the program begins in the foreground or in the
# background, and where it continues each time that it was stopped; a path in front of that is waited for. The last line
# has its exit code, and who has the terminal.
SHELL = """
import fcntl, os, signal, subprocess, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
first, *later = sys.argv[1].split()
def begin():
    if first == "foreground":
        os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
runner = subprocess.Popen(sys.argv[2:], process_group=0, preexec_fn=begin)
while os.WIFSTOPPED(status := os.waitpid(runner.pid, os.WUNTRACED)[1]):
    os.tcsetpgrp(0, os.getpid())
    print("stopped", flush=True)
    if later[0].startswith("/"):
        path = later.pop(0)
        while not os.path.exists(path):
            time.sleep(0.02)
    if later.pop(0) == "foreground":
        os.tcsetpgrp(0, runner.pid)
    os.killpg(runner.pid, signal.SIGCONT)
owner = {os.getpid(): "the shell's", runner.pid: "the runner's"}.get(os.tcgetpgrp(0), "nobody's")
print("ended", os.waitstatus_to_exitcode(status), owner, flush=True)
"""


@pytest.fixture
def manager(nodes: Servers) -> Iterator[LockManager]:
    """The locks of the processes, seen from here."""
    options = {"ttl": 10.0, "restart_guard": False, "node_timeout": 2.0}
    alias = {"NODES": nodes.urls[:3], "KEY_PREFIX": "live", "OPTIONS": options}
    with override_settings(REDLOCK={"default": alias}):
        yield locks["default"]


def test_program_runs_under_the_lock(live, manager):
    """The program gets the lock, its token and all that follows the dashes, and its exit code is the command's."""
    about = "os.environ['REDLOCK_NAME'], os.environ['REDLOCK_FENCING_TOKEN'], *sys.argv[1:]"
    code = f"{WORK}say(' '.join([{about}])); input(); sys.exit(7)"
    process = live.run("nightly", code, "--ttl", "x", "--", "-v", options=("--ttl", "60"))
    name, token, *arguments = said(process).split()

    with pytest.raises(LockTakenError) as taken:
        manager.lock("nightly", wait=0).acquire()
    process.stdin.write(b"\n")
    _, err, exit_code = outcome(process)

    assert (name, arguments, err, exit_code) == ("nightly", ["--ttl", "x", "--", "-v"], "", 7)
    assert int(token) > 0
    assert (taken.value.holder["kind"], taken.value.holder["label"]) == ("command", Path(sys.executable).name)
    assert is_free("nightly")


def finish(process):
    process.stdin.write(b"\n")
    return outcome(process)


def test_one_of_several_runs_does_the_work(live):
    """One of three concurrent runs runs the program, and the others are skipped with exit code 75."""
    three = [live.run("nightly", f"{WORK}say('working'); input()") for _ in range(3)]
    wait_until(lambda: sum(process.poll() is not None for process in three) == 2)
    (working,) = (process for process in three if process.poll() is None)
    skipped = [outcome(process) for process in three if process is not working]

    assert finish(working) == ("working", "", 0)
    assert [(out, code) for out, _, code in skipped] == [("", 75)] * 2
    assert all("Skipped: Lock 'nightly' is held by command" in err for _, err, _ in skipped)


@pytest.mark.endurance
def test_exit_codes_say_what_happened(live, manager, nodes):
    """A skipped run may be silent; a missing quorum has a code of its own, and other codes are those of shells."""
    with manager.lock("nightly"):
        assert outcome(live.run("nightly", "raise SystemExit(1)", options=("--skip-exit-code", "0"))) == ("", "", 0)
    for program, message, code in (("no-such-program", "No such file", 127), ("/etc/passwd", "Permission denied", 126)):
        _, err, ended_with = outcome(live.manage("redlock_run", "nightly", "--", program))
        assert (message in err, ended_with) == (True, code)
    process = live.run("nightly", f"{WORK}say('ready'); time.sleep({PATIENCE})")
    assert said(process) == "ready"
    process.terminate()
    assert outcome(process) == ("", "", 128 + signal.SIGTERM)
    assert is_free("nightly")

    nodes[0].kill()
    nodes[1].kill()
    out, err, code = outcome(live.run("nightly", f"{WORK}say('ran')"))

    assert (out, code) == ("", 69)
    assert "2 of 3 nodes must answer in time" in err


def test_run_may_wait_for_its_turn(live, manager, nodes):
    """With ``--wait`` a run is not skipped; after Ctrl-C it leaves the queue, and its program does not run."""
    lease = manager.lock("nightly").acquire()
    first, second = (live.run("nightly", f"{WORK}say('my turn')", options=("--wait", "forever")) for _ in range(2))
    with nodes[0].client() as client:
        wait_until(lambda: client.zcard("live:{nightly}:q") == 2)
    first.send_signal(signal.SIGINT)

    out, errors, code = outcome(first)
    assert (out, code) == ("", 130)
    sentence = r"CommandError: Interrupted while it waited for the lock 'nightly': '\S+' did not run\."
    assert re.fullmatch(sentence, errors.strip())
    assert lease.release() == "released"
    assert outcome(second) == ("my turn", "", 0)
    assert is_free("nightly")


HEEDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


@pytest.fixture
def no_nohup() -> Iterator[None]:
    """Processes that a test starts do not ignore SIGHUP, as they would under ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_signals_are_passed_on(no_nohup, live, manager):
    """The program gets each signal and decides; the command ends with its exit code, and the lock is free."""
    process = live.run("nightly", LISTENING, *HEEDED)
    assert said(process) == "ready"

    for name in HEEDED:
        process.send_signal(getattr(signal, name))
        assert said(process) == name

    assert outcome(process) == ("", "", 9)
    assert is_free("nightly")


def test_signal_that_comes_just_before_waiting_is_passed_on(monkeypatch, tmp_path):
    """A signal that arrives just after Python last checked for signals is passed on before the program ends."""
    ready = tmp_path / "ready"
    program = f"trap 'exit 9' USR1; touch {ready}; sleep 20 & wait"
    running = Child(["sh", "-c", program], grace=1, env=os.environ)
    while not ready.exists():
        time.sleep(0.01)
    first, waitid = [partial(ctypes.PyDLL(None).kill, os.getpid(), signal.SIGUSR1)], os.waitid

    def late(*args):
        calls = [*first, partial(waitid, *args)]
        first.clear()
        return list(map(operator.call, calls))[-1]  # one call into C, in which no handler runs

    monkeypatch.setattr(os, "waitid", late)
    with passed_on() as pass_to:
        pass_to(running)
        assert running.wait() == 9


def test_signal_that_comes_while_the_program_starts_is_passed_on(monkeypatch, manager):
    """A signal that ``redlock_run`` gets before the next line does not leave the program running without its lock."""

    def start(*args, **options):
        child = Child(*args, **options)
        os.kill(os.getpid(), signal.SIGUSR1)
        return child

    monkeypatch.setattr(redlock_run, "Child", start)
    with manager.lock("nightly") as lease:
        code = redlock_run._run(["sleep", str(PATIENCE)], lease, grace=1)

    assert code == 128 + signal.SIGUSR1


def test_lost_lock_ends_the_program_and_its_children(live, nodes):
    """When the nodes are gone for longer than the lease, the group gets SIGTERM, then SIGKILL, with exit code 76."""
    live.env["LIVE_TTL"] = "5"
    process = live.run("nightly", FAMILY, STUBBORN, options=("--grace", "1"))
    pids = {int(said(process)), int(said(process))}

    for node in nodes[:3]:
        node.kill()
    _, err, code = outcome(process)

    assert code == 76
    assert "the lock 'nightly' was lost: the lease ran out before it could be extended" in err
    wait_until(lambda: all(map(ended, pids)))


def test_program_of_another_user_goes_on_and_that_is_said(live):
    """As with ``sudo``: no signal reaches it, so nothing says that it was ended."""
    found = os.geteuid() == 0 and shutil.which("setpriv")
    needs("the command setpriv, as root", found, "apt-get install util-linux")
    live.env["LIVE_TTL"] = "2"
    without = ["setpriv", "--bounding-set", "-kill", "--inh-caps", "-kill", sys.executable, "-m", "django"]
    program = ["setpriv", "--reuid", "65534", "--clear-groups", "sleep", "4"]
    command = [*without, "redlock_run", "nightly", "--max-hold", "1", "--grace", "0", "--", *program]
    live.append(spawn(command, cwd=CHECKOUT, env=live.env, stdin=PIPE, stdout=PIPE, stderr=PIPE))

    _, err, code = outcome(live[-1])

    assert code == 76
    assert "Could not end 'setpriv', which belongs to another user, although the lock 'nightly' was lost" in err
    assert "no signal of this process reaches it" in err


@pytest.mark.endurance
def test_frozen_program_is_ended_at_max_hold(live):
    """``--max-hold`` limits a run that hangs, also one that was stopped (SIGSTOP)."""
    live.env["LIVE_TTL"] = "8"
    process = live.run("nightly", f"{WORK}say(os.getpid()); time.sleep({PATIENCE})", options=("--max-hold", "1"))
    pid = int(said(process))
    os.kill(pid, signal.SIGSTOP)

    _, err, code = outcome(process)

    assert (code, "it reached max_hold" in err) == (76, True)
    wait_until(lambda: ended(pid))


def test_killed_runner_takes_the_program_with_it(live):
    """If the runner gets SIGKILL, nothing renews its lock, so its program and that program's children end too."""
    process = live.run("nightly", FAMILY, STUBBORN, options=("--grace", "1"))
    pids = {int(said(process)), int(said(process))}

    process.kill()

    wait_until(lambda: all(map(ended, pids)))


KILLED = f"{WORK}say('worked'); os.kill(os.getppid(), signal.SIGKILL); os.killpg(0, signal.SIGKILL)"


def test_minimum_hold_outlives_all_processes(live, manager, nodes):
    """
    Runner and program get SIGKILL right after the work. The lock stays taken until ``--hold-for`` has passed since it
    was taken, also when one of the three nodes fails; the next run is skipped until then.
    """
    live.env["LIVE_TTL"] = "5"
    began = time.monotonic()
    assert outcome(live.run("nightly", KILLED, options=("--hold-for", "15"))) == ("worked", "", -signal.SIGKILL)
    nodes[0].kill()

    out, err, code = outcome(live.run("nightly", f"{WORK}say('ran')"))
    assert (out, code) == ("", 75)
    assert "Skipped: Lock 'nightly' is held by command" in err
    wait_until(lambda: is_free("nightly"))
    assert time.monotonic() - began >= 15


def test_minimum_hold_of_a_run_that_is_over(live, manager):
    """It is nobody's: the lists say until when it is held, and redlock_release ends it."""
    options = "--hold-for", "600"
    assert outcome(live.run("nightly", f"{WORK}sys.exit(3)", options=options)) == ("", "", 3)

    shown = outcome(live.manage("redlock_inspect", "nightly"))[0]
    assert re.search(r"State: +held until .*\d\d:\d\d:\d\d", shown)
    assert "nobody renews it" in shown
    assert outcome(live.manage("redlock_release", "nightly", "--no-input"))[2] == 0
    assert is_free("nightly")


@pytest.mark.endurance
def test_run_that_did_not_begin_or_failed_may_leave_the_lock_free(live, manager):
    """A host that lacks the program keeps no other from the work; with ``--no-hold-on-error``, no failed run does."""
    options = "--hold-for", "600"
    assert outcome(live.manage("redlock_run", "nightly", *options, "--", "no-such-program"))[2] == 127
    assert is_free("nightly")
    failed = live.run("nightly", f"{WORK}sys.exit(3)", options=(*options, "--no-hold-on-error"))
    assert outcome(failed) == ("", "", 3)
    assert is_free("nightly")


def test_program_that_no_command_line_can_name_leaves_the_lock_free(manager):
    """It comes from ``call_command()``, and the error says what is wrong."""
    with pytest.raises(CommandError, match=r"Cannot run 'echo\\x00': embedded null byte"):
        call_command("redlock_run", "--hold-for", "600", "nightly", "--", "echo\0")
    assert is_free("nightly")


def test_program_without_the_shell_that_would_end_it_does_not_run(monkeypatch, manager, tmp_path):
    """Nobody would end it if its runner were killed. It may have begun, so its minimum hold stays."""
    late = tmp_path / "late"

    def start(command, *about, **more):
        process = Popen(command, *about, **more)
        if command[0] == "/bin/sh":
            process.kill()
            process.wait()
        return process

    monkeypatch.setattr(process_group.subprocess, "Popen", start)
    with pytest.raises(CommandError, match="Ended 'sh': The shell that ends the program"):
        call_command("redlock_run", "--hold-for", "600", "nightly", "--", "sh", "-c", f"sleep 1; touch {late}")
    assert not is_free("nightly")
    assert not late.exists()


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal: the test's, and that of the programs."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


@pytest.fixture
def at_terminal(live, terminal):
    """Start a program under ``redlock_run`` as a shell would, with the terminal as its own and this standard input."""

    def start(places: str, code: str, stdin: str = "/dev/tty", neighbour: str = ""):
        inside = ["sh", "-c", f'{neighbour} exec "$@" <{stdin}', "sh"]
        inside += [sys.executable, "-m", "django", "redlock_run", "nightly", "--"]
        command = [sys.executable, "-c", SHELL, places, *inside, sys.executable, "-c", WORK + code]
        live.append(spawn(command, cwd=CHECKOUT, env=live.env, stdin=terminal[1], stdout=PIPE, stderr=PIPE))
        return live[-1], partial(os.write, terminal[0])

    return start


ASKING = "tty = open('/dev/tty', 'rb+', 0); say('got ' + tty.readline().decode().strip())"
# The handler may interrupt print(), which it must not call, then.
CONTINUING = "signal.signal(signal.SIGCONT, lambda *about: os.write(1, b'continued\\n')); say('ready')"


def said_until(process, last):
    """Return the lines up to one that begins with *last*."""
    lines = []
    while line := said(process):
        lines.append(line)
        if line.startswith(last):
            break
    return lines


@pytest.mark.endurance
def test_program_may_be_used_at_a_terminal(at_terminal, manager):
    """Typed input goes to the program, and so do Ctrl-C and Ctrl-Z; the runner stops, continues and dies with it."""
    code = f"say('got ' + input()); say('again ' + input()); time.sleep({PATIENCE})"
    process, type_in = at_terminal("foreground foreground", code)
    type_in(b"hello\n")
    assert said(process) == "got hello"

    type_in(b"\x1a")  # Ctrl-Z
    assert said(process) == "stopped"
    type_in(b"world\n")
    assert said(process) == "again world"
    type_in(b"\x03")  # Ctrl-C

    assert said(process) == f"ended {-signal.SIGINT} the runner's"
    assert is_free("nightly")


def test_program_may_ask_for_a_password_though_its_input_is_redirected(at_terminal, manager):
    """A program that opens the terminal itself, as ``ssh`` and ``sudo`` do, may read it, and it is given back."""
    process, type_in = at_terminal("foreground", ASKING, stdin="/dev/null")
    type_in(b"secret\n")

    assert [said(process), said(process)] == ["got secret", "ended 0 the runner's"]
    assert is_free("nightly")


@pytest.mark.parametrize("places", ["foreground foreground", "foreground background"])
def test_program_that_does_not_read_stops_and_continues_with_the_runner(at_terminal, manager, places):
    """By Ctrl-Z both stop, because a runner that is stopped does not renew the lock."""
    process, type_in = at_terminal(places, f"{CONTINUING}; time.sleep(0.5)", stdin="/dev/null")
    assert said(process) == "ready"
    type_in(b"\x1a")

    heard = said_until(process, "ended")
    assert (heard[0], "continued" in heard) == ("stopped", True)
    assert heard[-1] == ("ended 0 the runner's" if places.endswith("foreground") else "ended 0 the shell's")


def test_program_does_not_go_on_after_its_lock_was_lost_while_it_was_stopped(live, at_terminal, manager, tmp_path):
    """Another run may have begun, so the program is ended before it continues."""
    live.env["LIVE_TTL"] = "5"
    over = tmp_path / "over"
    code = f"{CONTINUING}; time.sleep({PATIENCE})"
    process, type_in = at_terminal(f"foreground {over} foreground", code, stdin="/dev/null")
    assert said(process) == "ready"
    type_in(b"\x1a")
    assert said(process) == "stopped"
    wait_until(lambda: is_free("nightly"))
    over.touch()

    assert said_until(process, "ended") == ["ended 76 the runner's"]


def test_runner_that_no_shell_could_continue_does_not_stop(live, terminal, manager):
    """As the only process at a terminal, such as that of a container, it goes on after Ctrl-Z, as any program does."""
    leader = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", leader, sys.executable, "-m", "django", "redlock_run", "nightly", "--"]
    command += [sys.executable, "-c", f"{WORK}{CONTINUING}; say('got ' + input())"]
    live.append(spawn(command, cwd=CHECKOUT, env=live.env, stdin=terminal[1], stdout=PIPE, stderr=PIPE))
    process, type_in = live[-1], partial(os.write, terminal[0])
    assert said(process) == "ready"
    type_in(b"\x1a")
    type_in(b"hello\n")

    heard = said_until(process, "got")
    assert ("continued" in heard, heard[-1]) == (True, "got hello")
    assert outcome(process)[2] == 0


def test_program_that_asks_in_the_background_waits_for_the_foreground(at_terminal, manager):
    """The shell sees that the runner is stopped, as it does for any program that reads the terminal then."""
    process, type_in = at_terminal("background foreground", ASKING, stdin="/dev/null")
    assert said(process) == "stopped"
    type_in(b"secret\n")

    assert [said(process), said(process)] == ["got secret", "ended 0 the runner's"]


def test_program_that_continues_in_the_background_leaves_the_shell_its_terminal(at_terminal, manager):
    """After Ctrl-Z and ``bg``, the program goes on without the terminal, also at its end."""
    code = f"{ASKING}\nwhile os.tcgetpgrp(tty.fileno()) == os.getpgrp(): time.sleep(0.01)\nsay('on')"
    process, type_in = at_terminal("foreground background", code, stdin="/dev/null")
    type_in(b"secret\n")
    assert said(process) == "got secret"
    type_in(b"\x1a")

    assert [said(process) for _ in range(3)] == ["stopped", "on", "ended 0 the shell's"]


def test_neighbour_that_reads_the_terminal_gets_it_back(at_terminal, manager, tmp_path):
    """A pager behind a pipe may read although the program has asked for a password, or neither would go on."""
    asked, read = tmp_path / "asked", tmp_path / "read"
    neighbour = f"(until [ -e {asked} ]; do sleep 0.05; done; head -n 1 </dev/tty; touch {read}) &"
    code = f"{ASKING}\nopen({str(asked)!r}, 'w')\nwhile not os.path.exists({str(read)!r}): time.sleep(0.01)"
    process, type_in = at_terminal("foreground", code, stdin="/dev/null", neighbour=neighbour)
    type_in(b"secret\n")
    assert said(process) == "got secret"
    type_in(b"more\n")

    assert [said(process), said(process)] == ["more", "ended 0 the runner's"]


def test_command_of_a_project_runs_once(live):
    """``@locked_command``: a second run for the same supplier is skipped, one for another supplier is not."""
    first = live.manage("restock", "7")
    assert said(first) == "restocking 7"

    _, err, code = outcome(live.manage("restock", "7"))
    other = finish(live.manage("restock", "8"))

    assert code == 75
    assert "Skipped: Lock 'command:restock:7' is held by command restock on" in err
    assert other == ("restocking 8", "", 0)
    assert finish(first) == ("", "", 0)
