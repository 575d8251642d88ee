"""A migrated database of each kind for every test, and a counter in it."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from django_redlock.models import Fence
from tests.lab.fencing import sources
from tests.lab.fencing.counting import CounterTable, prepare
from tests.services import django_database


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Close the managers and connections that the test's leases left open."""
    yield
    sources.forget()


@pytest.fixture(scope="session")
def prepared() -> Iterator["Prepared"]:
    """The databases that the tests of this process share, one of each kind."""
    with ExitStack() as stack:
        yield Prepared(stack, {})


@pytest.fixture
def counting(engine, prepared, django_db_blocker) -> Iterator[str]:
    """The alias of a migrated database of each kind in turn, without fences and with a counter of 0."""
    alias = f"counting_{engine.scheme}"  # other threads may still have a connection to another kind
    with django_db_blocker.unblock():
        with django_database(alias, engine.settings(prepared.database(engine))):
            CounterTable(alias).clear()
            Fence.objects.using(alias).all().delete()
            yield alias


class Prepared(NamedTuple):
    """Databases with a table of fences and a counter, by kind."""

    stack: ExitStack
    names: dict[str, str]

    def database(self, engine: Any) -> str:
        """Return the name of the database of a kind; it is created on first use."""
        if engine.scheme not in self.names:
            name = self.stack.enter_context(engine.database())
            with django_database("counting", engine.settings(name)):
                prepare("counting")
            self.names[engine.scheme] = name
        return self.names[engine.scheme]
