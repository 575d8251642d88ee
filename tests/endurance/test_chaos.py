"""More servers and another database than ``tox run -e chaos`` has, and a check that its judge notices violations."""

import pytest

from tests.conftest import needs
from tests.lab.chaos.__main__ import one
from tests.lab.chaos.clock import compiler
from tests.lab.chaos.history import History, Hold
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


def hold(token: int, since: float, until: float) -> Hold:
    return Hold(token=token, began=since - 0.1, since=since, deadline=until)


@pytest.mark.parametrize(
    ("holds", "overlaps", "wrong"),
    [
        ([hold(1, 1.0, 2.0), hold(2, 2.1, 3.0)], 0, 0),
        ([hold(1, 1.0, 9.0), hold(2, 2.0, 3.0), hold(3, 4.0, 5.0)], 2, 0),
        ([hold(2, 1.0, 2.0), hold(1, 2.2, 3.0)], 0, 1),
        ([hold(1, 1.0, 2.0), hold(1, 2.2, 3.0)], 0, 2),
    ],
    ids=["in order", "one over two", "older token later", "same token twice"],
)
def test_history_is_judged(holds: list[Hold], overlaps: int, wrong: int):
    """The judge finds intervals that overlap, and tokens that are not unique or out of order."""
    history = History(holds)

    assert len(history.overlaps()) == overlaps
    assert len(history.wrong_tokens()) == wrong
