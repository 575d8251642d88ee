"""Nodes in memory, which answer at once, however long this process waits for the processor."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client

from django_redlock import inventory
from django_redlock.testing import Servers


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a listing ask all nodes for all pages: on a busy machine it would stop before the end."""
    for listing in (inventory.held_locks, inventory.aheld_locks, inventory.held_in_each):
        monkeypatch.setitem(listing.__kwdefaults__, "seconds", 60.0)


@pytest.fixture
def five_servers(nodes: Servers, settings: Any) -> Servers:
    """Five real servers under the default alias; they have just started, so the restart guard is off."""
    settings.REDLOCK = {"default": {"NODES": nodes.urls, "OPTIONS": {"restart_guard": False, "node_timeout": 5.0}}}
    return nodes


@pytest.fixture
def five() -> Iterator[list[Any]]:
    """Five nodes in memory under the default alias."""
    from tests.held import nodes_in_memory

    with nodes_in_memory() as nodes:
        yield nodes


@pytest.fixture
def viewer(db: None) -> Client:
    """Somebody who may look at held locks."""
    from tests.held import client_of

    return client_of("view_heldlock")


@pytest.fixture
def operator(db: None) -> Client:
    """Somebody who may look at held locks and release them."""
    from tests.held import client_of

    return client_of("view_heldlock", "release_heldlock")
