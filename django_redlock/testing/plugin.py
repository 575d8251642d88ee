"""
Fixtures for pytest, for every project that has this package installed; their names begin with ``redlock_``.

``redlock_reset`` applies to every test. Imports come late, because tests that do not use locks load this module, too.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .servers import Servers
    from .simulation import Simulation


@pytest.fixture(autouse=True)
def redlock_reset() -> Iterator[None]:
    """
    Empty the nodes in memory when a test begins and when it ends.

    To keep locks from one test to the next, define a fixture of this name that does nothing in the module, the class or
    the ``conftest.py``.
    """
    from .reset import reset_locks

    reset_locks()
    yield
    reset_locks()


@pytest.fixture
def redlock_simulation() -> "Iterator[Simulation]":
    """Put the alias ``default`` over three nodes in memory that fail on command, in virtual time."""
    from .simulation import Simulation

    with Simulation() as simulation:
        yield simulation


@pytest.fixture(scope="session")
def _redlock_servers() -> "Iterator[Servers]":
    from .servers import start_servers

    with start_servers(5) as servers:
        yield servers


@pytest.fixture
def redlock_servers(_redlock_servers: "Servers") -> "Servers":
    """Start five real servers once, and give them to each test running and empty."""
    _redlock_servers.reset()
    return _redlock_servers
