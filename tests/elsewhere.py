"""
Hide what Windows and macOS lack, before the package is imported: ``python -m pytest -p tests.elsewhere ...``.

There is no such machine here, so this is a simulation: ``poll``, ``fork`` and what follows a fork, Unix sockets, the
wake-up by signals, the death of a child with its parent. Tests whose subject is one of these are left out.
"""

import os
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

WITHOUT = {
    os: ["fork", "forkpty", "register_at_fork", "sched_getaffinity"],
    select: ["poll", "epoll"],
    signal: ["set_wakeup_fd"],
    socket: ["AF_UNIX"],
}

subprocess._CAN_USE_PIDFD_OPEN = False  # type: ignore[attr-defined]  # of Linux; Python 3.15 would poll it
socket.socketpair = partial(socket.socketpair, socket.AF_UNIX)  # Python has one everywhere, over TCP if it must
for module, names in WITHOUT.items():
    for name in names:
        delattr(module, name)
selectors.DefaultSelector = selectors.SelectSelector  # type: ignore[misc]
if hasattr(os, "process_cpu_count"):  # from Python 3.13 on; it would call what is hidden
    os.process_cpu_count = os.cpu_count  # type: ignore[assignment,unused-ignore]

FORKS = re.compile(r"\bfork\(|\bReader\(|fork_and_lock|prefork|\bredlock_run\b")


def pytest_configure() -> None:
    from django_redlock.testing import servers

    servers.sys = SimpleNamespace(**{**vars(sys), "platform": "elsewhere"})


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files in which something forks, or starts a program that does."""
    return (collection_path.suffix == ".py" and bool(FORKS.search(collection_path.read_text("utf-8")))) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of Unix sockets."""
    without = [item for item in items if "unix" in item.name]
    config.hook.pytest_deselected(items=without)
    items[:] = [item for item in items if item not in without]
