"""
Identify this process, and notice forks, even those that Python does not see, such as uWSGI's (internal).

Asking for the process id is a system call, and a lock makes few of those. Linux can clear a page of memory in a forked
child, and reading that page costs almost nothing.
"""

import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

HOST = socket.gethostname()

WIPE_ON_FORK = 18  # MADV_WIPEONFORK, since Linux 4.14


class Process:
    """
    The running process, as its leases and the nodes know it; a forked child is another one.

    Attributes:
        pid: The process id.
        name: A name that no other process has, including past and future ones on this host.
        mark: Its first item is false in a forked child that has not noticed the fork. Whoever begins something on
            behalf of a user reads it, and calls :meth:`notice_fork` if it is false.
        ends: Whether the process is about to end, so that nothing may be left to a background thread.
        kept: What must not be freed before the process ends.
        starts: Functions to call in a forked child before it uses a lock or a lease.
        mutex: Held by the one thread of a forked child that drops what belongs to the parent, while the others wait.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.name = _new_name()
        self.ends = False
        self.kept: list[Any] = []
        self.starts: list[Callable[[], object]] = []
        self.mutex = threading.Lock()
        self.mark: mmap.mmap | Pid = _page() or Pid()
        self.mark[0] = 1

    def begin(self) -> None:
        """Start over, in a forked child."""
        self.mutex = threading.Lock()  # another thread of the parent may have been holding it
        self.pid, self.name = os.getpid(), _new_name()
        for start in self.starts:
            start()
        self.mark[0] = 1  # last: other threads may go on now

    def notice_fork(self) -> None:
        """Start over if this is a forked child that has not done so: uWSGI forks without running Python's hooks."""
        if not self.mark[0]:
            with self.mutex:
                if not self.mark[0]:  # still: no other thread was quicker
                    self.begin()


class Pid:
    """A mark for systems that cannot clear a page of memory in a forked child: it asks for the process id."""

    def __getitem__(self, index: int) -> bool:
        return self._pid == os.getpid()

    def __setitem__(self, index: int, value: int) -> None:
        self._pid = os.getpid()


def _new_name() -> str:
    return f"{os.getpid():x}.{os.urandom(6).hex()}"


def _page() -> mmap.mmap | None:
    """Return a memory page that reads as 0 in a forked child, or None if the system cannot provide one."""
    if sys.platform != "linux":
        return None
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.madvise(WIPE_ON_FORK)
    except OSError:
        return None
    return page


process = Process()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=process.begin)
