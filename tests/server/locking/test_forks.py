"""How a process notices that it was forked."""

import ctypes
import os
from collections.abc import Callable

import pytest

from django_redlock.engine import process
from tests.managers import Manager, unwatched

from .test_processes import fork


@pytest.mark.parametrize("page", [True, False], ids=["page", "process id"])
@pytest.mark.parametrize("fork_again", [os.fork, ctypes.PyDLL(None).fork], ids=["Python", "C"])
def test_child_does_not_hold_the_locks_of_its_parent(
    memory: Manager, monkeypatch: pytest.MonkeyPatch, page: bool, fork_again: Callable[[], int]
):
    """The child notices, whoever forked, and whether or not the system empties a page in the child."""

    def parent() -> int:
        if not page:
            monkeypatch.setattr(process.process, "mark", process.Pid())
            process.process.mark[0] = 1
        # Without a watchdog: forked in C by a process with more threads, a child may wait for ever for the interpreter,
        # which a thread that it does not have has asked for.
        lease = unwatched(memory(3)).lock("a", renew=False).acquire()
        if not (child := fork_again()):
            os._exit(0 if lease.reason == "forked" and not lease.valid() else 1)
        status = os.waitpid(child, 0)[1]
        return status or not lease.valid()

    assert fork(parent) == 0
