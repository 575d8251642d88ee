"""Two Redis servers and one database are a majority of three: any one of them may die."""

import asyncio

import pytest
from django.core.management import call_command

from django_redlock.testing import Servers
from tests.managers import (
    EACH_TABLE_ONCE,
    Blocking,
    Flavour,
    Tables,
    connect,
    eventually,
    real_manager,
)
from tests.server.locking.test_waiting import Line
from tests.services import PostgreSQL, django_database

from .test_replicated import any_one_may_die

pytestmark = pytest.mark.usefixtures("unblocked")


def test_any_one_of_two_redis_and_a_database_may_die(nodes: Servers, postgresql: PostgreSQL):
    """Whichever is down, the other two decide."""
    with postgresql.database() as name, django_database("voting", postgresql.settings(name)):
        call_command("migrate", "redlock", database="voting", verbosity=0, skip_checks=True)
        any_one_may_die(nodes, postgresql, "database://voting")


@EACH_TABLE_ONCE
async def test_waiters_of_a_mixed_majority_are_notified_by_the_redis_servers(
    nodes: Servers, tables: Tables, flavour: Flavour
):
    """Two Redis servers are enough to notify the next waiter; the database sends no notifications."""
    manager = real_manager([*nodes.urls[:2], tables.urls[0]])
    connect(manager)
    holder = await flavour.acquire(manager.lock("a"))
    line = Line(flavour, manager)
    tasks = [await line.join(number) for number in range(3)]
    notifications = (
        manager.driver.notifications if isinstance(flavour, Blocking) else manager.driver.loop_side().notifications
    )
    await eventually(lambda: notifications.waiters.notified)

    await flavour.release(holder)
    await asyncio.gather(*tasks)

    assert line.served == [0, 1, 2]
    assert notifications.waiters.listening == {0, 1}
