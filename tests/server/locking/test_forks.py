"""How a process notices that it was forked."""

import ctypes
import os
from collections.abc import Callable

import pytest

from django_redlock.engine import process

from .test_processes import fork


@pytest.mark.parametrize("page", [True, False], ids=["page", "process id"])
@pytest.mark.parametrize("fork_again", [os.fork, ctypes.PyDLL(None).fork], ids=["Python", "C"])
def test_child_knows_that_it_is_one(monkeypatch: pytest.MonkeyPatch, page: bool, fork_again: Callable[[], int]):
    """P30, L41: the child notices, whoever forked, and whether or not the system empties a page in the child."""
    if not page:
        monkeypatch.setattr(process, "_page", lambda: None)

    def parent() -> int:
        mark = process.ForkMark()
        before = mark.is_gone()
        if not (child := fork_again()):
            noticed = mark.is_gone()
            mark.note()
            os._exit(0 if noticed and not mark.is_gone() else 1)
        status = os.waitpid(child, 0)[1]
        return status or before or mark.is_gone()

    # Forked in C by a process with more threads, a child may wait for ever for a thread that it does not have.
    assert fork(parent) == 0
