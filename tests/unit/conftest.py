"""Nodes in memory answer at once, however long this process waits for the processor."""

import pytest

from django_redlock import inventory


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a listing ask all nodes for all pages: on a busy machine it would stop before the end."""
    for listing in (inventory.held_locks, inventory.aheld_locks):
        monkeypatch.setitem(listing.__kwdefaults__, "seconds", 60.0)
