"""The records of etcd and of ZooKeeper."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.etcd import Member
from tests.managers import real_manager
from tests.zookeeper import Zoo


@pytest.fixture(params=["etcd", "zookeeper"])
def store(request: pytest.FixtureRequest) -> Member | Zoo:
    """A server of each kind, empty."""
    found: Member | Zoo = request.getfixturevalue(request.param)
    return found


def opened(store: Member | Zoo) -> Iterator[Any]:
    (node,) = real_manager([store.url]).nodes
    with closing(node.table(30.0)) as found:
        found.open()
        yield found


@pytest.fixture
def table(store: Member | Zoo) -> Iterator[Any]:
    """The records of a server."""
    yield from opened(store)


@pytest.fixture
def other(store: Member | Zoo) -> Iterator[Any]:
    """The same records over another connection, as in another process."""
    yield from opened(store)
