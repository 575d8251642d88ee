"""The kind of node on the page *Add a node kind*: it comes in by ``BACKEND``, and keeps the contract of every node."""

import re
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.core.management import call_command
from django.test import override_settings

from django_redlock import LockTakenError, QuorumUnavailableError, lock, locks
from django_redlock.admin.pages import panels
from django_redlock.checks import check_settings
from tests.held import NODES, client_of
from tests.unit.test_docs_code import blocks

PAGE = "docs/contribute/node-kind.md"


def typed(name: str) -> dict[str, Any]:
    """Return the names in a module that the page shows."""
    (block,) = [block for block in blocks(PAGE) if block.text.startswith(f"# {name}.py")]
    module = ModuleType(name.replace("/", "."))
    sys.modules[module.__name__] = module
    exec(block.compiled(), vars(module))
    return vars(module)


typed("shop/locks")
TestFileNode = typed("tests/test_locks")["TestFileNode"]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A file that is the only node, under the setting of the page."""
    (block,) = [block for block in blocks(PAGE) if "REDLOCK = " in block.text]
    namespace: dict[str, Any] = {}
    exec(re.sub("/var/lib/shop", str(tmp_path), block.text), namespace)
    with override_settings(REDLOCK=namespace["REDLOCK"]):
        yield tmp_path / "locks"
        locks.reset()


def test_it_comes_in_by_the_setting(path: Path):
    """Its locks are in the file, and outlive the connections of a process; the error about a mistake is the page's."""
    assert [message.id for message in check_settings()] == ["redlock.W001"]
    lease = lock("a", wait=0).acquire()
    locks.reset()
    with pytest.raises(LockTakenError):
        lock("a", wait=0).acquire()
    assert lease.secret in path.read_text()

    nowhere = {"BACKEND": "shop.locks.FileNode", "URL": "file:///nowhere/locks"}
    with override_settings(REDLOCK={"default": {"NODES": [nowhere]}}):
        (error,) = check_settings()
    assert "cannot be used: it needs a URL such as file:///var/lib/shop/locks, in a folder that exists" in error.msg


def test_file_that_was_deleted_has_lost_its_locks(path: Path):
    """A process that is connected notices it with its next request."""
    lock("a", wait=0).acquire()
    path.unlink()

    with pytest.raises(QuorumUnavailableError, match="restarted"):
        lock("a", wait=0).acquire()


@pytest.mark.django_db
def test_doctor_and_admin_show_it(path: Path):
    """The doctor tries a lock on it, and the page of the nodes says that it votes."""
    lock("a", wait=0).acquire()
    out = StringIO()

    call_command("redlock_doctor", stdout=out)
    page = client_of("view_heldlock").get(NODES).content.decode()
    (panel,) = panels()

    assert "shop: not a server that can be inspected; it is tested with a lock." in out.getvalue()
    assert [(row.name, row.votes, row.answers, row.locks) for row in panel.rows] == [("shop", True, "yes", "1")]
    assert ">shop<" in re.sub(r">\s+|\s+<", lambda at: at[0].strip(), page)
