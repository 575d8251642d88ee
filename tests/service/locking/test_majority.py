"""A majority of nodes of several kinds."""

import asyncio
from contextlib import closing

import pytest
from django.core.management import call_command

from django_redlock import QuorumUnavailableError
from django_redlock.testing import Servers
from tests.managers import Blocking, Flavour, Tables, connect, eventually, patient_manager, real_manager
from tests.server.locking.test_waiting import Line
from tests.services import PostgreSQL, django_database


@pytest.mark.usefixtures("unblocked")
def test_any_one_of_two_redis_and_a_database_may_die(nodes: Servers, postgresql: PostgreSQL):
    """Two Redis servers and a node of another kind are a majority of three."""
    with postgresql.database() as name, django_database("voting", postgresql.settings(name)):
        call_command("migrate", "redlock", database="voting", verbosity=0, skip_checks=True)
        with closing(patient_manager([*nodes.urls[:2], "database://voting"], node_timeout=2.0)) as manager:
            held = [manager.lock("a", wait=0).acquire()]
            nodes[0].kill()
            held.append(manager.lock("b", wait=30).acquire())
            nodes[0].start()
            postgresql.kill()
            held.append(manager.lock("c", wait=30).acquire())
            nodes[1].kill()
            with pytest.raises(QuorumUnavailableError):
                manager.lock("d", wait=0).acquire()
            postgresql.start()
            held.append(manager.lock("d", wait=60).acquire())

            assert all(lease.valid() for lease in held)
            for lease in held:
                lease.release()


@pytest.mark.parametrize("tables", ["sqlite"], indirect=True)
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
