"""
Reads in a fenced block, where a router sends reads to a replica that lags.

The replica is a second real database with an older version of the rows. Nothing replicates: what counts is which of the
two a query reaches. That is decided before any database is asked, so files of SQLite stand for all kinds.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connections, router, transaction
from django.db.models import Min
from django.http import HttpResponse
from django.test import RequestFactory
from django.utils.module_loading import import_string

from django_redlock import StaleTokenError, fenced, lock_for_update, locked_view
from django_redlock.checks import check_routers
from tests.services import SQLite, django_database
from tests.shop.helpers import in_thread
from tests.shop.models import Customer, GiftOrder, Letter, Order, Parcel, Purchase, Region, RegisteredLetter

from .sources import claim, lease_of

PIN = "django_redlock.routers.FencedRouter"
MODELS = (Region, Customer, Parcel, Letter, RegisteredLetter, Order, GiftOrder, Purchase)


class Replicated:
    """Writes to the primary and reads from the replica, as in Django's documentation."""

    def db_for_read(self, model, **hints):
        return "replica"

    def db_for_write(self, model, **hints):
        return "primary"

    def allow_relation(self, one, other, **hints):
        return True


class Archived:
    """Keeps regions in a database of their own, and the rest in one primary."""

    def db_for_read(self, model, **hints):
        return "archive" if model is Region else "primary"

    db_for_write = db_for_read


HERE = f"{__name__}.Replicated"


@pytest.fixture
def primary(tmp_path, settings, django_db_blocker) -> Iterator[str]:
    """A primary whose order 7 has a total of 100, and a replica where it still has 7; reads go to the replica."""
    engine = SQLite(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(django_db_blocker.unblock())
        for alias, total in (("primary", 100), ("replica", 7)):
            name = stack.enter_context(engine.database())
            stack.enter_context(django_database(alias, engine.settings(name)))
            call_command("migrate", "redlock", database=alias, verbosity=0, skip_checks=True)
            with connections[alias].schema_editor() as editor:
                for model in MODELS:
                    editor.create_model(model)
            Order.objects.using(alias).create(pk=7, total=total)
            region = Region.objects.using(alias).create(pk=1, name=alias)
            customer = Customer.objects.using(alias).create(pk=1, region=region)
            Purchase.objects.using(alias).create(pk=1, customer=customer, total=total).orders.set([7])
        settings.DATABASE_ROUTERS = [Replicated()]
        yield "primary"
        # The thread of asynchronous code outlives the test, and would still know these databases in the next one.
        asyncio.run(sync_to_async(forget_connections)())


def forget_connections() -> None:
    for alias in ("primary", "replica"):
        connections[alias].close()
        del connections[alias]


@pytest.fixture
def pinned(primary, settings) -> str:
    """The same with the pin."""
    settings.DATABASE_ROUTERS = [PIN, Replicated()]
    return primary


def increment() -> None:
    """Do what the example of the documentation does: read, change, save."""
    order = Order.objects.get(pk=7)
    order.total += 1
    order.save()


def total(alias: str = "primary") -> int:
    return Order.objects.using(alias).get(pk=7).total


def source() -> str:
    """Return the database that an ordinary query reaches."""
    return Region.objects.get().name


# Refused


def test_blocks_that_would_read_from_a_replica_are_refused(primary, leases):
    """No update is lost to an old value: no such block begins or takes a lock, and the error says what to type."""
    order, how = Order.objects.using(primary).get(), r"\(\.\.\., route_reads=True\)"

    for target in (order, [order], Order.objects.filter(pk=7), Order.objects):
        with pytest.raises(ImproperlyConfigured, match=f"Or write lock_for_update{how}"):
            lock_for_update(target).__enter__()
    with pytest.raises(ImproperlyConfigured):
        Order.objects.all().redlock_for_update().__enter__()
    assert leases == []
    with pytest.raises(ImproperlyConfigured, match=rf"'replica'.*'{PIN}' first.*fenced{how}"):
        fenced(lease_of("order:7"), using=primary).__enter__()
    for wrong in ("primary", None):
        with pytest.raises(TypeError, match="route_reads must be True or False"):
            fenced(lease_of("a"), route_reads=wrong)
        with pytest.raises(TypeError, match="route_reads must be True or False"):
            lock_for_update(Order.objects.all(), route_reads=wrong)


async def test_asynchronous_blocks_are_refused_as_well(primary):
    """``async with``, ``arun()`` and ``run()`` refuse the same."""
    lease = await sync_to_async(lease_of)("order:7")

    with pytest.raises(ImproperlyConfigured):
        await fenced(lease, using=primary).__aenter__()
    with pytest.raises(ImproperlyConfigured):
        await fenced(lease, using=primary).arun(increment)
    with pytest.raises(ImproperlyConfigured):
        await lock_for_update(Order.objects.all()).__aenter__()


@pytest.mark.parametrize(
    ("routers", "safe"),
    [
        ([], True),
        ([Archived()], True),  # which only distributes the models over databases
        ([Replicated()], False),
        ([PIN, Replicated()], True),
        ([HERE, PIN], False),  # the first that chooses wins
        ([object(), import_string(PIN)(), HERE], True),
    ],
)
def test_block_begins_where_it_reads_what_it_writes(primary, settings, routers, safe):
    """A block is refused, and redlock.W032 says what to type, unless the pin comes before a router that splits."""
    settings.DATABASE_ROUTERS = routers

    with nullcontext() if safe else pytest.raises(ImproperlyConfigured), fenced(lease_of("order:7"), using=primary):
        Order.objects.using(primary).update(total=1)

    found = check_routers()
    assert (total(), [each.id for each in found]) == ((1, []) if safe else (100, ["redlock.W032"]))
    assert all("to 'primary', but reads to 'replica'" in each.msg for each in found)
    assert all(f"Put '{PIN}' first in DATABASE_ROUTERS" in each.hint for each in found)


def test_router_that_does_not_answer_for_a_model_is_no_obstacle(primary, settings):
    """A router may need a hint or a tenant; the models for which it answers are still judged."""

    class Moody(Replicated):
        def db_for_read(self, model, **hints):
            if model is not Order:
                raise LookupError("no tenant")
            return self.reads

        reads = "primary"

    settings.DATABASE_ROUTERS = [Moody()]
    with fenced(lease_of("order:7"), using=primary):
        increment()
    assert total() == 101

    router.routers[0].reads = "replica"
    with pytest.raises(ImproperlyConfigured, match=r"shop\.Order"), fenced(lease_of("order:7"), using=primary):
        pytest.fail("the body ran")


def test_refusal_can_be_switched_off(primary, settings):
    """With route_reads=True, reads follow the routers, with and without the pin; the locked rows are current anyway."""
    for routers in ([Replicated()], [PIN, Replicated()]):
        settings.DATABASE_ROUTERS = routers
        with fenced(lease_of("order:7"), using=primary, route_reads=True):
            assert source() == "replica"
        with lock_for_update(Order.objects.all(), route_reads=True) as (order,):
            assert (source(), order.total) == ("replica", 100)
        with Order.objects.all().redlock_for_update(route_reads=True) as (order,):
            assert (source(), order.total) == ("replica", 100)


# Pinned


def test_fenced_block_reads_where_it_claims(pinned):
    """A fenced block and the callbacks of its commit read from the primary, and nothing else is pinned."""
    found, lease, later = [], lease_of("order:7", fencing_token=33), lease_of("order:7", fencing_token=34)
    assert source() == "replica"

    with fenced(lease, using=pinned):
        increment()
        found += [in_thread(source), source()]
        transaction.on_commit(lambda: found.append(source()), using=pinned)
    assert (found, source()) == (["replica", "primary", "primary"], "replica")
    fenced(lease, using=pinned).run(increment)
    with pytest.raises(ZeroDivisionError):
        fenced(later, using=pinned).run(lambda: 1 / 0)
    assert source() == "replica"
    claim(later, pinned)
    with pytest.raises(StaleTokenError):
        fenced(lease, using=pinned).run(pytest.fail, "the body ran")

    assert (source(), total()) == ("replica", 102)


def test_every_read_of_a_block_is_pinned(pinned):
    """A query, a refresh, a relation, a prefetch and a queryset that was made before the block reach the primary."""
    before, old = Purchase.objects.all(), Purchase.objects.get()

    with lock_for_update(Order.objects.prefetch_related("purchase_set")) as (order,):
        found = {
            order.total,
            order.purchase_set.all()[0].total,
            Order.objects.get(pk=7).total,
            before.get().total,
            before.prefetch_related("orders")[0].orders.all()[0].total,
            Order.objects.raw(f"SELECT * FROM {Order._meta.db_table}")[0].total,
            Purchase.objects.aggregate(least=Min("total"))["least"],
        }
        regions = {old.customer.region.name, Customer.objects.select_related("region").get().region.name}
        old.refresh_from_db()
        found.add(old.total)
        with transaction.atomic(using=pinned):
            found.add(Order.objects.get().total)

    assert found == {100}
    assert regions == {"primary"}


def test_queries_of_an_asynchronous_block_are_pinned(pinned):
    """The pin follows the block into the threads of its queries and into its tasks, and ends with the block."""

    async def main() -> list[str]:
        lease = await sync_to_async(lease_of)("order:7")
        going, go = asyncio.Event(), asyncio.Event()

        async def outlive() -> list[str]:
            during = (await Region.objects.aget()).name
            going.set()
            await go.wait()
            return [during, router.db_for_read(Region)]  # without a query: the block's thread has ended

        async with fenced(lease, using=pinned):
            order = await Order.objects.aget(pk=7)
            order.total += 1
            await order.asave()
            task = asyncio.create_task(outlive())
            await going.wait()
        go.set()
        found = [*await task, (await Region.objects.aget()).name]
        async with lock_for_update(Order.objects.all()):
            found.append((await Region.objects.aget()).name)
            await sync_to_async(increment)()
        await fenced(lease, using=pinned).arun(increment)
        return [*found, (await Region.objects.aget()).name]

    assert asyncio.run(main()) == ["primary", "replica", "replica", "primary", "replica"]
    assert total() == 103


def test_blocks_of_two_databases_pin_both(tmp_path, pinned, settings):
    """Each model is read where it is written, in nested blocks and in one block over both databases."""

    class Split(Replicated):
        def db_for_write(self, model, **hints):
            return "archive" if model is Region else "primary"

    def sources() -> tuple[str, int]:
        return source(), Order.objects.get().total

    settings.DATABASE_ROUTERS = [PIN, Split()]
    engine = SQLite(tmp_path)
    with engine.database() as name, django_database("archive", engine.settings(name)):
        call_command("migrate", "redlock", database="archive", verbosity=0, skip_checks=True)
        with connections["archive"].schema_editor() as editor:
            editor.create_model(Region)
        Region.objects.using("archive").create(name="archive")

        with fenced(lease_of("order:7"), using="primary"):
            outer = [sources()]
            with fenced(lease_of("region:1"), using="archive"):
                both = [sources()]
            outer.append(sources())
        with fenced(lease_of("order:7"), using=["primary", "archive"]):
            both.append(sources())

    assert both == [("archive", 100)] * 2
    assert outer == [("replica", 100)] * 2


# Views


@pytest.mark.parametrize("atomic", [False, True])
def test_locked_view_reads_where_it_writes(pinned, monkeypatch, atomic):
    """The next request must see what the last one wrote; a request that is not locked reads from the replica."""
    monkeypatch.setitem(connections.settings[pinned], "ATOMIC_REQUESTS", atomic)

    @locked_view("order:{pk}")
    def view(request, pk):
        return HttpResponse(source())

    @locked_view("order:{pk}")
    async def later(request, pk):
        return HttpResponse((await Region.objects.aget()).name)

    requests = RequestFactory()
    assert [view(ask("/"), pk=7).content for ask in (requests.post, requests.get)] == [b"primary", b"replica"]
    if not atomic:  # which Django does not have for these
        answers = [async_to_sync(later)(ask("/"), pk=7) for ask in (requests.post, requests.get)]
        assert [answer.content for answer in answers] == [b"primary", b"replica"]
    assert source() == "replica"


# The check


def test_router_that_chooses_now_and_then_is_reported(primary, settings):
    """One question is not enough for a router that spreads reads over the primary and its replicas."""

    class Spread(Replicated):
        turn = 0

        def db_for_read(self, model, **hints):
            if model is Order:
                self.turn += 1
            return "replica" if self.turn == 7 else "primary"

    settings.DATABASE_ROUTERS = [Spread()]

    assert [each.id for each in check_routers()] == ["redlock.W032"]


@pytest.mark.parametrize("routers", [["no.such.Router"], None, "django_redlock.routers.FencedRouter"])
def test_check_survives_routers_that_cannot_be_used(monkeypatch, routers):
    """Django reports such a setting itself."""
    monkeypatch.setattr(router, "_routers", routers)
    monkeypatch.delitem(router.__dict__, "routers", raising=False)
    monkeypatch.setattr("django.conf.settings.DATABASE_ROUTERS", routers)

    assert check_routers() == []
