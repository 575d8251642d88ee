"""
Notice that this process was forked, also by those who do not tell Python of it, such as uWSGI.

Asking for the process id each time is a system call, of which a lock has few. Linux empties a page of memory in a
forked child if it is asked to, and a look at that costs nothing.
"""

import mmap
import os
import sys

WIPE_ON_FORK = 18  # MADV_WIPEONFORK, since Linux 4.14


class ForkMark:
    """Tells this process from its forked children."""

    def __init__(self) -> None:
        self._page = _page()
        self.note()

    def note(self) -> None:
        """Note that this is the process; in a child, it has been noticed."""
        self._pid = os.getpid()
        if self._page:
            self._page[0] = 1

    def is_gone(self) -> bool:
        """Return whether this is a child of the process that was noted."""
        return not self._page[0] if self._page else self._pid != os.getpid()


def _page() -> mmap.mmap | None:
    """Return a page that says 1 here and 0 in a forked child, or None if there is no such thing."""
    if sys.platform != "linux":
        return None
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.madvise(WIPE_ON_FORK)
    except OSError:
        return None
    return page
