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

HOST = socket.gethostname()

WIPE_ON_FORK = 18  # MADV_WIPEONFORK, since Linux 4.14


class Process:
    """The running process, as its leases and the nodes know it; a forked child is another one."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.name = _new_name()
        self.ends = False
        """Whether the process is about to end, so that nothing may be left to a background thread."""
        self.starts: list[Callable[[], object]] = []
        """Functions to call in a forked child before it uses a lock or a lease."""
        self.mutex = threading.Lock()
        """Held by the one thread of a forked child that drops what belongs to the parent, while the others wait."""
        self._mark = ForkMark()

    def begin(self) -> None:
        """Start over, in a forked child."""
        self.mutex = threading.Lock()  # another thread of the parent may have been holding it
        self.pid, self.name = os.getpid(), _new_name()
        for start in self.starts:
            start()
        self._mark.note()  # last: other threads may go on now

    def notice_fork(self) -> None:
        """Start over if this is a forked child that has not done so: uWSGI forks without running Python's hooks."""
        if self._mark.is_gone():
            with self.mutex:
                if self._mark.is_gone():  # still: no other thread was quicker
                    self.begin()


class ForkMark:
    """Distinguishes this process from its forked children."""

    def __init__(self) -> None:
        self._page = _page()
        self.note()

    def note(self) -> None:
        """Mark the running process; in a child, this records that the fork has been noticed."""
        self._pid = os.getpid()
        if self._page:
            self._page[0] = 1

    def is_gone(self) -> bool:
        """Return whether this is a forked child of the process that was marked."""
        return not self._page[0] if self._page else self._pid != os.getpid()


def _new_name() -> str:
    """Return a name that no other process has, including past and future ones on this host."""
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
