"""A migrated database of each kind for every test, and a counter in it."""

from collections.abc import Iterator

import pytest

from django_redlock.models import Fence
from tests.services import django_database

from . import sources
from .counting import CounterTable, prepare


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Close the managers and connections that the test's leases left open."""
    yield
    sources.forget()


@pytest.fixture
def counting(engine, prepared, django_db_blocker) -> Iterator[str]:
    """The alias of a migrated database of each kind in turn, without fences and with a counter of 0."""
    alias = f"counting_{engine.scheme}"  # other threads may still have a connection to another kind
    with django_db_blocker.unblock():
        with django_database(alias, engine.settings(prepared.database(engine, prepare))):
            CounterTable(alias).clear()
            Fence.objects.using(alias).all().delete()
            yield alias
