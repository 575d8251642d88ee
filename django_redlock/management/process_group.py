"""
Run a program in a process group of its own, which does not outlive the lock (internal).

Signals are passed on to the group. When the lock is lost, the group gets SIGTERM and, if it still exists after the
grace period, SIGKILL. If this process is killed, nobody renews the lock any more, and a guardian does the same.
"""

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from ..runtime.clock import steady

log = logging.getLogger("django_redlock")

PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGTSTP", "SIGUSR1", "SIGUSR2")
LOOK = 0.05  # seconds between two checks whether a group that received the signal has ended

# The guardian reads the number of the group, and then nothing until the writer is gone: a killed process closes its
# pipes. It is a shell, because every POSIX system has one, and a shell takes a twentieth of Python's memory.
GUARDIAN = """\
read -r group && ! read -r nothing || exit
kill -s TERM -- "-$group" 2>/dev/null && kill -s CONT -- "-$group" 2>/dev/null || exit
waited=0
while kill -s 0 -- "-$group" 2>/dev/null; do
  [ "$waited" -ge "$1" ] && { kill -s KILL -- "-$group"; exit; }
  sleep 1
  waited=$((waited + 1))
done
"""


class Child:
    """
    A running program.

    Args:
        command: The program and its arguments.
        grace: Seconds from SIGTERM to SIGKILL.
        env: The program's environment.

    Raises:
        OSError, ValueError: The program cannot be started.
        RuntimeError: It was killed, because nobody would end it if this process were killed.
    """

    def __init__(self, command: Sequence[str], *, grace: float, env: Mapping[str, str]) -> None:
        self._grace = grace
        self._deadline: float | None = None  # when a group that received the signal must be gone
        self._reaped = False
        self.is_out_of_reach = False  # whether it is known to belong to another user
        self._mutex = threading.RLock()  # reentrant: a signal may arrive while this thread has it
        self._guardian = subprocess.Popen(
            ["/bin/sh", "-c", GUARDIAN, "redlock_run", str(round(grace))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._process = subprocess.Popen(command, env=env, process_group=0)
        except BaseException:
            self._dismiss()
            raise
        assert self._guardian.stdin is not None
        try:
            self._guardian.stdin.write(b"%d\n" % self._process.pid)
            self._guardian.stdin.flush()
        except OSError as error:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._dismiss()
            raise RuntimeError("The shell that ends the program if this process is killed has ended itself.") from error

    @property
    def pid(self) -> int:
        """The program's process id, which is also the number of its group."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal to the whole group, unless the program has ended."""
        with self._mutex:
            if self._reaped:  # from then on, another process can get its number
                return
            if not _kill_group(self.pid, number) and _is_out_of_reach(self.pid) and not self.is_out_of_reach:
                self.is_out_of_reach = True
                log.error("the program belongs to another user, so no signal of this process reaches it")

    def end(self) -> None:
        """Send the group SIGTERM now and SIGKILL after the grace period; return at once, in any thread."""
        with self._mutex:
            if self._deadline is not None or self._reaped:
                return
            self._deadline = steady() + self._grace
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # a stopped process would react only to SIGKILL
        timer = threading.Timer(self._grace, self.signal, [signal.SIGKILL])
        timer.daemon = True
        timer.start()

    def wait(self, look: Callable[[], object] = lambda: None) -> int:
        """
        Wait for the program to end, and return its exit code; if a signal ended it, the code is above 128.

        If the group received the signal to end, all its processes are gone by then.

        Args:
            look: Called after this process was stopped, before the program goes on; it may end the program.
        """
        self._wait_for_end(look)
        with self._mutex:
            self._reaped = True
        code = self._process.wait()
        # The program may have left processes in its group. If the lock is lost, none of them may go on without it.
        while self._deadline is not None and _kill_group(self.pid, 0):
            if steady() >= self._deadline:
                _kill_group(self.pid, signal.SIGKILL)
                break
            time.sleep(LOOK)
        self._dismiss()
        return code if code >= 0 else 128 - code

    def _wait_for_end(self, look: Callable[[], object]) -> None:
        """Block until the program has ended, without reaping it; signals are handled meanwhile."""
        with terminal_lent(self.pid, look) as stopped, next_signal() as wait:
            ends = os.WEXITED | os.WNOWAIT | os.WNOHANG | (os.WSTOPPED if stopped else 0)
            while True:
                found = os.waitid(os.P_PID, self.pid, ends)
                if found is None:
                    wait()
                elif stopped is None or found.si_code != os.CLD_STOPPED:
                    return
                else:
                    os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG)
                    stopped(found.si_status)

    def _dismiss(self) -> None:
        self._guardian.kill()
        self._guardian.communicate()  # closes the pipe, and waits


def _kill_group(group: int, number: int) -> bool:
    """Send a signal to a group; return whether any process was there to get it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS reports this for a group in which only its leader is left, which has ended
        return False
    return True


def _is_out_of_reach(pid: int) -> bool:
    """Return whether a process belongs to another user."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        pass
    return False


@contextmanager
def next_signal() -> Iterator[Callable[[], object]]:
    """
    Yield a function that waits for a signal, even one that came before the call; SIGCHLD reports the end of a child.

    Python runs a handler between two bytecodes. A signal that comes after the last bytecode, but before a system call
    blocks, would wait for as long as the call does. But the signal is written into a pipe at once, which wakes the
    call.
    """
    if threading.current_thread() is not threading.main_thread():  # other threads get no signals
        yield lambda: time.sleep(LOOK)
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler):  # only a signal with a Python handler is written into the pipe
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        yield lambda: os.read(reading, 4096)
    finally:
        signal.set_wakeup_fd(before)
        if not callable(handler):
            signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)
        os.close(reading)
        os.close(writing)


@contextmanager
def passed_on() -> Iterator[Callable[[Child], None]]:
    """
    Pass the signals of this process on to the child that is given to the yielded function, those that came before, too.

    Signals that this process ignores, as under nohup, stay ignored. The others are caught before there is a child.
    Otherwise a signal that ended this process just after the start of the program would leave the program running
    without its lock.
    """
    children: list[Child] = []
    early: list[int] = []
    before: dict[int, Any] = {}

    def pass_on(number: int, frame: FrameType | None) -> None:
        if children:
            children[0].signal(number)
        else:
            early.append(number)

    def pass_to(child: Child) -> None:
        children.append(child)  # first, so that a signal that comes now reaches the child at once
        while early:
            child.signal(early.pop(0))

    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited; the system would reap the program
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for name in PASSED_ON:
            number = getattr(signal, name)
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, pass_on)
    try:
        yield pass_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def terminal_lent(group: int, look: Callable[[], object]) -> Iterator[Callable[[int], None] | None]:
    """
    Lend the terminal to a group that wants it, and stop and continue together with the group, as shells expect.

    A program in a group of its own is in the background: it may write to the terminal, and Ctrl-C and Ctrl-Z come to
    this process, which passes them on. If it reads, it is stopped, and gets the terminal if this process has it. From
    then on, Ctrl-C and Ctrl-Z go to the program alone, until it has ended, or another process of a pipeline, such as a
    pager, reads.

    It yields a function to be called with a signal that stopped the group; None in a thread, which gets no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    try:  # the terminal itself: a program that asks for a password opens it, whatever its standard input is
        terminal = os.open(os.ctermid(), os.O_RDWR)
    except OSError:
        terminal = None
    ours = os.getpgrp()

    def give_back(number: int = 0, frame: FrameType | None = None) -> None:
        if terminal is not None and _foreground(terminal) == group:
            _put_in_foreground(terminal, ours)
            _kill_group(ours, signal.SIGCONT)  # others in this group may have been stopped, such as a pager

    def pause() -> None:
        """Stop as the group did, until somebody continues this process."""
        _kill_group(group, signal.SIGSTOP)  # all of it: nobody would renew the lock of the others
        give_back()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        _kill_group(ours, signal.SIGTSTP)  # has no effect where no shell could continue it; SIGSTOP would
        signal.signal(signal.SIGTSTP, handler)
        time.sleep(LOOK)  # not to spin there, if the group wants a terminal that it never gets
        look()  # the lock may be lost by now
        _kill_group(group, signal.SIGCONT)

    def stopped(number: int) -> None:
        wants, owner = number in (signal.SIGTTIN, signal.SIGTTOU), _foreground(terminal)
        if terminal is not None and wants and owner == ours:
            _put_in_foreground(terminal, group)
            _kill_group(group, signal.SIGCONT)
        elif wants or number == signal.SIGTSTP or owner == group:
            pause()

    # All processes of a group get the signal of the one that wants the terminal; this one has a lock to renew.
    before = {
        signal.SIGTTIN: signal.signal(signal.SIGTTIN, give_back),
        signal.SIGTTOU: signal.signal(signal.SIGTTOU, signal.SIG_IGN),
    }
    try:
        yield stopped
    finally:
        give_back()
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if terminal is not None:
            os.close(terminal)


def _foreground(terminal: int | None) -> int | None:
    """Return the group that has the terminal; None if there is none, or it was hung up."""
    with suppress(OSError):
        return None if terminal is None else os.tcgetpgrp(terminal)
    return None


def _put_in_foreground(terminal: int, group: int) -> bool:
    try:
        os.tcsetpgrp(terminal, group)
    except OSError:  # the group has ended, or the terminal was hung up
        return False
    return True
