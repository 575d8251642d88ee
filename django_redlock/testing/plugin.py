"""Fixtures for pytest, there for whoever has this package installed; each is named ``redlock_...``."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .servers import Servers
    from .simulation import Simulation


@pytest.fixture
def redlock_simulation() -> "Iterator[Simulation]":
    """The locks of the alias ``default`` over three nodes in memory that fail on command, in virtual time."""
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
    """Five real servers, all running and empty, whatever the last test did to them."""
    _redlock_servers.reset()
    return _redlock_servers
