"""More servers and another database than ``tox run -e chaos`` has."""

import pytest

from tests.conftest import needs
from tests.lab.chaos.__main__ import one
from tests.lab.chaos.clock import compiler
from tests.lab.chaos.nemesis import PROFILES
from tests.services import PostgreSQL

# The counters are in a database of their own, which is not one of Django's test databases.
pytestmark = [pytest.mark.django_db(databases=[]), pytest.mark.usefixtures("unblocked")]


def test_five_servers_and_postgresql(postgresql: PostgreSQL):
    """A short run with five servers, and with a database that lets a holder wait inside its transaction."""
    needs("a C compiler", compiler(), "apt-get install gcc libc6-dev")

    result = one(postgresql, PROFILES["everything"], 10.0, nodes=5)

    assert not result.failures
    assert result.counted["fenced"][1]
