"""How a process notices that it was forked."""

import ctypes
import os

import pytest

from django_redlock.engine import process


@pytest.mark.parametrize("page", [True, False], ids=["page", "process id"])
@pytest.mark.parametrize("fork", [os.fork, ctypes.PyDLL(None).fork], ids=["Python", "C"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_child_knows_that_it_is_one(monkeypatch: pytest.MonkeyPatch, page: bool, fork: object):
    """P30, L41: whoever forked, and whether or not the system empties a page in the child."""
    if not page:
        monkeypatch.setattr(process, "_page", lambda: None)
    mark = process.ForkMark()
    before = mark.is_gone()

    if not (child := fork()):
        noticed = mark.is_gone()
        mark.note()
        os._exit(0 if noticed and not mark.is_gone() else 1)

    assert os.waitpid(child, 0)[1] == 0
    assert (before, mark.is_gone()) == (False, False)
