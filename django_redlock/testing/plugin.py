"""
Fixtures for pytest, available wherever this package is installed; each is named ``redlock_...``.

``redlock_reset`` applies to every test of a project that has ``django_redlock`` in ``INSTALLED_APPS``. Imports are
inside functions, because pytest loads this plugin for the tests of every other project, too.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .servers import Servers
    from .simulation import Simulation  # only here: see above


@pytest.fixture(autouse=True)
def redlock_reset() -> Iterator[None]:
    """
    Empty the in-memory nodes at the beginning and at the end of each test.

    It does nothing if the project's ``INSTALLED_APPS`` do not have ``django_redlock``.

    To keep locks from test to test, define a fixture of this name that does nothing in the module, class or
    ``conftest.py``.
    """
    django = sys.modules.get("django.apps")
    if django is None or not django.apps.ready or not django.apps.is_installed("django_redlock"):
        yield
        return
    from .reset import reset_locks  # only here: pytest loads this module before coverage measures

    reset_locks()
    yield
    reset_locks()


@pytest.fixture
def redlock_simulation() -> "Iterator[Simulation]":
    """
    Run the alias ``default`` over in-memory nodes that fail on command, in virtual time.

    There are three, or as many as ``NODES`` has if its ``OPTIONS`` choose a quorum.
    """
    from .simulation import Simulation  # only here: see above

    with Simulation() as simulation:
        yield simulation


@pytest.fixture(scope="session")
def _redlock_servers() -> "Iterator[Servers]":
    from .servers import start_servers  # only here: see above

    with start_servers(5) as servers:
        yield servers


@pytest.fixture
def redlock_servers(_redlock_servers: "Servers") -> "Servers":
    """Start five real servers once per session; each test gets them running and empty."""
    _redlock_servers.reset()
    return _redlock_servers
