"""Fixtures of all tests that use the shop."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections

from django_redlock.signals import lock_acquired, lock_released


@pytest.fixture
def shop(settings: Any) -> Iterator[None]:
    from tests.shop.helpers import during

    settings.ROOT_URLCONF = "tests.shop.urls"
    yield
    during(lambda: None)


@pytest.fixture
def leases() -> Iterator[list[Any]]:
    acquired: list[Any] = []

    def remember(lease: Any, **about: Any) -> None:
        acquired.append(lease)

    lock_acquired.connect(remember)
    yield acquired
    lock_acquired.disconnect(remember)


@pytest.fixture
def atomic_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A project in which every request is a transaction of the database with a file."""
    monkeypatch.setitem(connections.settings["warehouse"], "ATOMIC_REQUESTS", True)


@pytest.fixture
async def async_connections() -> AsyncIterator[None]:
    """Closes the connections of the thread in which asynchronous code reaches the database."""
    yield
    await sync_to_async(connections.close_all)()


@pytest.fixture
def order(transactional_db: None) -> Any:
    """Order 7, in the database that is a file, so that a second connection reads it."""
    from tests.shop.models import Order

    return Order.objects.using("warehouse").create(pk=7)


@pytest.fixture
def seen_at_release() -> Iterator[list[bool]]:
    """Return what another connection reads of order 7 at the moment when the lock is free: whether it is paid."""
    from tests.shop.helpers import paid_as_others_see

    seen: list[bool] = []

    def look(**about: Any) -> None:
        seen.append(paid_as_others_see())

    lock_released.connect(look)
    yield seen
    lock_released.disconnect(look)
