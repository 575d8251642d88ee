"""``lock_for_update`` in processes of their own, over real nodes and a real database."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, connections, transaction

from django_redlock import lock_for_update
from django_redlock.signals import lock_released
from tests.managers import wait_until
from tests.shop.models import Order, Parcel, ParcelLetter, Purchase, Stock, Voucher


@pytest.fixture
def total_at_release(database: str) -> Iterator[list[int]]:
    """Return what another connection reads at the moment when the lock is free."""
    seen: list[int] = []

    def look(**about: Any) -> None:
        with ThreadPoolExecutor(1) as thread:
            seen.append(thread.submit(total_of_others, database).result())

    lock_released.connect(look)
    yield seen
    lock_released.disconnect(look)


def total_of_others(database: str) -> int:
    try:
        return Order.objects.using(database).get(pk=7).total
    finally:
        connections.close_all()


def add(order: Order, number: int) -> None:
    order.total += number
    order.save()


def test_lock_is_free_when_the_outcome_is_known(database: str, total_at_release: list[int]):
    """On every engine the lock outlasts commit, rollback and the rollback of a savepoint."""
    order = Order.objects.using(database).create(pk=7)

    with lock_for_update(order):
        add(order, 1)
        with suppress(ZeroDivisionError), transaction.atomic(using=database):
            add(order, 10)
            raise ZeroDivisionError
        order.refresh_from_db()
        add(order, 1)
        assert total_at_release == []
    with suppress(ZeroDivisionError), lock_for_update([order]):
        add(order, 10)
        raise ZeroDivisionError
    with lock_for_update(Order.objects.using(database).select_for_update().filter(pk=7)) as orders:
        add(orders[0], 1)

    assert total_at_release == [2, 2, 3]


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_related_rows_are_locked_in_both_ways(database: str, engine: Any):
    """A queryset may lock its related rows in the database as well."""
    made = Purchase.objects.using(database).create(parcel=Parcel.objects.using(database).create(code="both"))
    both = Purchase.objects.using(database).select_related("parcel").filter(parcel="both")

    with lock_for_update(both.select_for_update(of=("self", "parcel")), of=("parcel",)) as locked:
        assert locked == [made]
    made.delete()


@pytest.mark.parametrize("engine", ["postgresql", "mariadb"], indirect=True)
def test_lost_connection_undoes_the_block_and_frees_the_lock(database: str, engine: Any, total_at_release: list[int]):
    """When the server ends the connection inside the block, nothing is committed, and the lock is free."""
    order = Order.objects.using(database).create(pk=7)

    def work() -> None:
        with lock_for_update(order):
            add(order, 1)
            name = connections[database].settings_dict["NAME"]
            for (pid,) in engine.execute(BACKENDS[engine.scheme].format(name)):
                engine.execute(KILL[engine.scheme].format(pid))
            add(order, 1)

    with pytest.raises(DatabaseError):
        work()

    connections[database].close()
    assert total_at_release == [0]


BACKENDS = {
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE datname = '{}'",
    "mariadb": "SELECT id FROM information_schema.processlist WHERE db = '{}'",
}
KILL = {"postgresql": "SELECT pg_terminate_backend({})", "mariadb": "KILL {}"}


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_rows_of_every_key_are_locked_and_read_again(database: str, engine: Any):
    """UUID, composite, inherited and related keys work on a database with types of its own."""
    voucher = Voucher.objects.using(database).create()
    stock = Stock.objects.using(database).create(place="here", article="pen")
    letter = ParcelLetter.objects.using(database).create(code="x", stamp=3)
    purchase = Purchase.objects.using(database).create(parcel_id="x")
    Stock.objects.using(database).update(count=5)

    with lock_for_update([voucher, stock, letter, purchase], of=()) as rows:
        assert (rows, stock.count) == ([voucher, stock, letter, purchase], 5)
    with lock_for_update(Stock.objects.using(database).all()) as stocks:
        assert stocks == [stock]
    with lock_for_update(Purchase.objects.using(database).all(), of=("parcel",)) as purchases:
        assert purchases == [purchase]


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
async def test_asynchronous_blocks_leave_no_connection_behind(database: str, engine: Any):
    """Eight concurrent blocks have eight connections, and none of them is left afterwards."""
    await Order.objects.using(database).abulk_create(Order(pk=pk) for pk in range(1, 9))
    backends = BACKENDS["postgresql"].format(connections.settings[database]["NAME"])
    inside = asyncio.Barrier(8)
    seen = []

    async def count_up(pk: int) -> None:
        order = await Order.objects.using(database).aget(pk=pk)
        async with lock_for_update(order):
            order.total += 1
            await order.asave()
            await inside.wait()
            seen.append(len(await sync_to_async(engine.execute, thread_sensitive=False)(backends)))
            await inside.wait()

    await asyncio.gather(*(count_up(pk) for pk in range(1, 9)))
    totals = [order.total async for order in Order.objects.using(database).all()]
    await sync_to_async(connections.close_all)()

    assert totals == [1] * 8
    assert min(seen) == 10  # with the connection of the shared thread, and that of this test
    wait_until(lambda: len(engine.execute(backends)) == 1)
