"""
``lock_for_update``: rows under a lock that encloses their transaction.

Where the view of others matters, the rows are in the database ``warehouse``, a file that a second connection reads.
"""

import asyncio
import threading
import uuid
from decimal import Decimal, localcontext
from enum import StrEnum

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, connections, models, transaction
from django.db.models.functions import Rank
from django.test import TestCase
from django.utils.functional import SimpleLazyObject

from django_redlock import LockLostError, LockTakenError, StaleTokenError, lock, locks
from django_redlock.models import Fence
from django_redlock.querysets import RowLock, lock_for_update
from django_redlock.signals import lock_acquired
from tests.shop.helpers import in_thread, is_free, lose
from tests.shop.models import (
    Customer,
    Digest,
    Draft,
    GiftOrder,
    Invoice,
    Order,
    OrderProxy,
    Parcel,
    ParcelLetter,
    Purchase,
    Region,
    RegisteredLetter,
    Stock,
    Voucher,
    Weight,
    WrappedGiftOrder,
)

PURCHASES = Purchase.objects.all()
PLACE = models.Window(Rank(), order_by="total")
TWO_DATABASES = pytest.mark.django_db(transaction=True, databases=["default", "warehouse"])


@pytest.fixture
def when_locked():
    """Calls a function once, as soon as the next lock is acquired."""
    actions = []

    def receive(**about):
        if actions:
            actions.pop()()

    lock_acquired.connect(receive)
    yield actions.append
    lock_acquired.disconnect(receive)


def total_seen_by_others(order):
    return in_thread(lambda: Order.objects.using("warehouse").get(pk=order.pk).total)


def change(order, *, total, then):
    order.total = total
    order.save()
    then()


def fail():
    raise ZeroDivisionError


def order_name(order):
    return f"model:shop.order:{order.pk}"


# The locked and the returned rows


@pytest.mark.django_db
def test_instance_is_refreshed_under_its_lock(when_locked):
    order = Order.objects.create(total=1)
    when_locked(lambda: Order.objects.update(total=2))

    with lock_for_update(order) as locked:
        assert locked is order
        assert order.total == 2
        with pytest.raises(LockTakenError, match=f"is held by model shop.Order {order.pk}"):
            lock(order_name(order), wait=0).acquire()

    assert is_free(order_name(order))


@pytest.mark.django_db
def test_rows_that_no_longer_match_are_left_out(when_locked, leases):
    """Rows that changed while the caller waited are not in the list, and none moves up into a slice."""
    orders = [Order.objects.create(number=str(number)) for number in range(4)]
    when_locked(lambda: (Order.objects.filter(number="1").delete(), Order.objects.filter(number="2").update(paid=True)))

    with lock_for_update(Order.objects.filter(paid=False).order_by("-number")) as locked:
        assert locked == [orders[3], orders[0]]
    when_locked(lambda: Order.objects.filter(number="0").update(paid=True))
    with lock_for_update(Order.objects.filter(paid=False).order_by("number")[:1]) as locked:
        assert locked == []
    assert leases[1].names == (order_name(orders[0]),)

    for nothing in (Order.objects.none(), []):  # no lock, but a transaction
        with lock_for_update(nothing) as locked:
            assert (locked, connection.in_atomic_block) == ([], True)
    assert len(leases) == 2


@pytest.mark.django_db
@pytest.mark.parametrize("count", [1, 2])  # a single one, and one of a list
def test_vanished_instance_raises_when_it_was_deleted_meanwhile(when_locked, count):
    """An instance whose row is gone raises DoesNotExist, and the locks are released."""
    orders = [Order.objects.create() for _ in range(count)]
    when_locked(lambda: Order.objects.filter(pk=orders[-1].pk).delete())

    with pytest.raises(Order.DoesNotExist), lock_for_update(orders[0] if count == 1 else orders):
        pytest.fail("entered")

    assert all(map(is_free, map(order_name, orders)))


class ByApp:
    """A router that looks at the model, as that of Django's manual does."""

    def db_for_write(self, model, **hints):
        return "default" if model._meta.app_label == "shop" else None


@pytest.mark.django_db
def test_nothing_is_locked_with_a_router(settings):
    """An empty list has no model that a router could look at."""
    settings.DATABASE_ROUTERS = [ByApp()]

    with lock_for_update([]) as locked:
        assert locked == []


@pytest.mark.django_db
def test_queryset_method_takes_the_same_options(leases):
    """``redlock_for_update()`` of a LockableQuerySet and of its manager is ``lock_for_update()``."""
    order = Order.objects.create()

    with Order.objects.filter(pk=order.pk).redlock_for_update(ttl=20) as locked:
        assert locked == [order]
    with (
        lock(order_name(order)),
        pytest.raises(LockTakenError, match=order_name(order)),
        Order.objects.redlock_for_update(nowait=True),
    ):
        pytest.fail("entered")

    assert [lease.names for lease in leases] == [(order_name(order),)] * 2


# Several instances


@pytest.mark.django_db
def test_instances_are_refreshed_in_place(when_locked, django_assert_num_queries, leases):
    """A list gives the same instances in the same order, refreshed with one query, under one lock."""
    orders = [Order.objects.create() for _ in range(3)][::-1]
    with lock_for_update(orders):
        pass
    when_locked(lambda: Order.objects.update(total=2))

    with django_assert_num_queries(5), lock_for_update(orders) as locked:  # the update above, and a savepoint
        assert [id(order) for order in locked] == [id(order) for order in orders]
        assert [order.total for order in orders] == [2, 2, 2]

    assert leases[-1].names == tuple(sorted(map(order_name, orders)))


@pytest.mark.django_db
def test_instances_may_be_of_several_models():
    """
    A parent and its child, a row twice, and rows of other tables are locked together; each is refreshed.

    So is the instance in a lazy object, such as ``request.user``.
    """
    gift = GiftOrder.objects.create(pk=7, greeting="hello")
    order, again = Order.objects.get(pk=7), Order.objects.get(pk=7)
    stock = Stock.objects.create(place="here", article="pen")
    lazy = SimpleLazyObject(lambda: Order.objects.get(pk=7))
    assert lazy.total == 0
    Order.objects.update(total=2)
    GiftOrder.objects.update(greeting="bye")
    Stock.objects.update(count=5)

    with lock_for_update([gift, order, stock, again, lazy]) as locked:
        assert locked == [gift, order, stock, again, lazy]
        assert (gift.total, gift.greeting, order.total, again.total, stock.count) == (2, "bye", 2, 2, 5)
        assert lazy.total == 2
        assert not is_free("model:shop.order:7")
        assert not is_free("model:shop.stock:here,pen")
    Order.objects.update(total=3)
    with lock_for_update(lazy) as locked:
        assert (locked.total, lazy.total, is_free("model:shop.order:7")) == (3, 3, False)


@pytest.mark.django_db
def test_refreshed_instances_forget_what_they_knew_of_others():
    """Related rows that an instance of a list had fetched are fetched anew, as after ``refresh_from_db()``."""
    purchases = [Purchase.objects.create(customer=new_customer()) for _ in range(2)]
    first = Purchase.objects.prefetch_related("orders").select_related("customer__region").get(pk=purchases[0].pk)
    other = new_customer()
    Purchase.objects.update(customer=other)
    first.orders.through.objects.create(purchase=first, order=Order.objects.create())

    with lock_for_update([first, purchases[1]]):
        assert first.customer == other
        assert first.orders.count() == len(first.orders.all()) == 1


@pytest.mark.django_db
@pytest.mark.parametrize("count", [1, 2])
def test_instances_are_refreshed_in_their_own_way(count):
    """A model's own ``refresh_from_db()`` is called, in a list as well: it may note what was read."""
    drafts = [Draft.objects.create() for _ in range(count)]
    Draft.objects.update(text="new")

    with lock_for_update(drafts):
        assert [draft.read for draft in drafts] == ["new"] * count


def new_customer():
    return Customer.objects.create(region=Region.objects.create())


# Related rows


@pytest.mark.django_db
def test_related_rows_are_locked_with_a_row(leases):
    """``of`` names foreign keys, over several steps, and what inherits tables; a null one locks nothing more."""
    gift = GiftOrder.objects.create(pk=7)
    customer = new_customer()
    letter = RegisteredLetter.objects.create(number=3, letter_id=9)
    bought = Purchase.objects.create(
        customer=customer, parcel=Parcel.objects.create(code="x"), gift=gift, letter=letter
    )
    empty = Purchase.objects.create()
    of = ("self", "customer", "customer__region", "parcel", "gift", "letter")
    names = {
        f"model:shop.customer:{customer.pk}",
        f"model:shop.region:{customer.region_id}",
        "model:shop.parcel:x",
        "model:shop.order:7",
        "model:shop.letter:9",
        f"model:shop.purchase:{bought.pk}",
    }

    for target in (bought, [bought], Purchase.objects.filter(pk=bought.pk)):
        with lock_for_update(target, of=of):
            pass
    with lock_for_update(Purchase.objects.all(), of=of):
        pass
    with lock_for_update(empty, of=of):
        pass

    assert [set(lease.names) for lease in leases[:3]] == [names] * 3
    assert set(leases[3].names) == {*names, f"model:shop.purchase:{empty.pk}"}
    assert leases[4].names == (f"model:shop.purchase:{empty.pk}",)


@pytest.mark.django_db
@pytest.mark.parametrize("kind", ["instance", "list", "queryset"])
def test_related_row_that_changed_meanwhile_is_locked_instead(when_locked, leases, kind):
    """A row that points to another related row by now is locked anew, together with the right one."""
    purchase, other = Purchase.objects.create(customer=new_customer()), new_customer()
    target = {"instance": purchase, "list": [purchase], "queryset": Purchase.objects.all()}[kind]
    when_locked(lambda: Purchase.objects.update(customer=other))

    with lock_for_update(target, of=("customer",)) as locked:
        assert (locked if kind == "instance" else locked[0]).customer_id == other.pk
        assert not is_free(f"model:shop.customer:{other.pk}")

    assert len(leases) == 2


@pytest.mark.django_db
def test_related_row_that_never_stays_the_same_is_an_error(when_locked):
    """When the related row differs each time, the error says what is missing, and nothing stays locked."""
    purchase = Purchase.objects.create(customer=new_customer())
    for _ in range(3):
        when_locked(lambda: Purchase.objects.update(customer=new_customer()))

    with (
        pytest.raises(RuntimeError, match="others again each of 3 times"),
        lock_for_update(purchase, of=("customer",)),
    ):
        pytest.fail("entered")

    assert is_free(f"model:shop.purchase:{purchase.pk}")


@pytest.mark.django_db
@pytest.mark.parametrize("late", [False, True], ids=["all at once", "one by one"])
@pytest.mark.parametrize("instances", [False, True], ids=["of a queryset", "of instances"])
def test_rows_with_a_common_related_row_can_be_skipped(monkeypatch, late, instances):
    """``skip_locked`` gives all free rows that share a related row, even if the nodes name the holder too late."""
    customer = new_customer()
    purchases = [Purchase.objects.create(customer=customer) for _ in range(3)]
    everything = purchases if instances else Purchase.objects.order_by("pk")
    if late:
        monkeypatch.setattr(RowLock, "_free", lambda self, rows: rows)

    with lock(f"model:shop.purchase:{purchases[1].pk}"):
        with lock_for_update(everything, skip_locked=True, of=("customer",)) as locked:
            assert locked == [purchases[0], purchases[2]]
            assert not is_free(f"model:shop.customer:{customer.pk}")
    with lock(f"model:shop.customer:{customer.pk}"):
        with lock_for_update(everything, skip_locked=True, of=("customer",)) as locked:
            assert locked == []


# Bad input


@pytest.mark.parametrize(
    ("target", "options", "error", "message"),
    [
        (Order(pk=7), {}, ValueError, r"This shop\.Order is not saved.* Save it first"),
        (Stock(place="here"), {}, ValueError, r"This shop\.Stock is not saved.* Save it first"),
        (Order, {}, TypeError, "write Order.objects.all"),
        ({1, 2}, {}, TypeError, "needs a model instance, a list of instances or a queryset, not set"),
        ([1, 2], {}, TypeError, "of a list needs model instances, not int"),
        (Order.objects.values("total"), {}, TypeError, r"leave out values\(\)"),
        (Order.objects.annotate(place=PLACE), {}, TypeError, "without the others that a window function looks at"),
        (Order.objects.alias(place=PLACE).filter(place=3), {}, TypeError, r"filter\(pk__in=\[\.\.\.\]\)"),
        (Order.objects.all().union(Order.objects.all()), {}, TypeError, "Q objects"),
        (Order.objects.all(), {"nowait": True, "skip_locked": True}, ValueError, "nowait, skip_locked and wait"),
        (Order.from_db("default", ["id"], [7]), {"skip_locked": True}, ValueError, "use nowait"),
        (PURCHASES, {"of": "customer"}, TypeError, r"such as \('customer',\), not the str"),
        (PURCHASES, {"of": [Purchase.customer]}, TypeError, r"such as \('customer',\), not \[<"),
        (PURCHASES, {"of": ["customer__name"]}, ValueError, "__name': shop.Customer has no 'name'; it has region"),
        (PURCHASES, {"of": ["total"]}, ValueError, "shop.Purchase.total is not a relation to one row"),
    ],
)
def test_what_cannot_be_locked_is_refused(target, options, error, message):
    """A mistake is an error that says what to pass, before any row is read."""
    with pytest.raises(error, match=message):
        lock_for_update(target, **options)


@pytest.fixture
def requests(monkeypatch):
    """The requests that one of the nodes got."""
    node = locks["default"].nodes[0]
    execute, got = node.execute, []
    monkeypatch.setattr(node, "execute", lambda request, *mark: got.append(request) or execute(request, *mark))
    return got


@pytest.mark.django_db
def test_two_hundred_rows_are_locked_in_one_round_and_more_are_refused(leases, requests):
    """However many rows there are, a node gets few requests; too many rows are an error before that."""
    Order.objects.bulk_create(Order() for _ in range(201))

    with pytest.raises(ValueError, match="more than 200 rows"), lock_for_update(Order.objects.all()):
        pytest.fail("entered")
    with lock_for_update(Order.objects.all()[:200]) as locked:
        assert (len(locked), len(requests)) == (200, 1)

    assert (len(leases), len(requests)) == (1, 2)
    orders = Order.objects.order_by("pk")[:100]
    with lock([order_name(order) for order in orders[::10]]), lock_for_update(orders, skip_locked=True) as locked:
        assert len(locked) == 90
    assert len(requests) <= 2 + 2 + 6


@pytest.mark.django_db
@pytest.mark.parametrize("limit", [None, 1000], ids=["all", "slice"])
def test_rows_that_a_join_repeats_are_all_locked(limit):
    """A row that a join returns three times counts once; otherwise a third of these would be left out silently."""
    orders = Order.objects.bulk_create(Order() for _ in range(100))
    for _ in range(3):
        Purchase.objects.create().orders.set(orders)
    bought = Order.objects.filter(purchase__total=0).prefetch_related("purchase_set")

    with lock_for_update(bought.order_by("pk")[:limit]) as locked:
        assert {order.pk for order in locked} == {order.pk for order in orders}
        assert not is_free(order_name(orders[-1]))

    Purchase.objects.create().orders.set(Order.objects.bulk_create(Order() for _ in range(101)))
    with pytest.raises(ValueError, match="more than 200 rows"), lock_for_update(bought):
        pytest.fail("entered")


@pytest.mark.django_db
def test_block_cannot_be_entered_twice():
    """One object of lock_for_update() serves one block at a time, and another one afterwards."""
    order = Order.objects.create()
    guard = lock_for_update(order, nowait=True)

    with lock(order_name(order)), pytest.raises(LockTakenError), guard:
        pytest.fail("entered")
    with guard, pytest.raises(RuntimeError, match="already entered"), guard:
        pytest.fail("entered")
    with guard:
        pass


# Names


class Place(models.TextChoices):
    HERE = "here"


class Color(StrEnum):
    RED = "red"


@pytest.mark.django_db
def test_rows_with_decimal_keys_have_names_of_their_own(leases):
    """Whatever precision the thread's arithmetic has."""
    rows = [Weight.objects.create(kilograms=Decimal(text)) for text in ("12.51", "12.52")]
    with localcontext() as context:
        context.prec = 3
        with lock_for_update(rows) as locked:
            assert locked == rows

    assert [lease.names for lease in leases] == [("model:shop.weight:12.51", "model:shop.weight:12.52")]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: OrderProxy.objects.create(pk=7), "model:shop.order:7"),
        (lambda: WrappedGiftOrder.objects.create(pk=7), "model:shop.order:7"),
        (lambda: RegisteredLetter.objects.create(number=3, letter_id=7), "model:shop.letter:7"),
        (lambda: Invoice.objects.create(order=Order.objects.create(pk=7)), "model:shop.invoice:7"),
        (lambda: Parcel.objects.create(code="a:b"), "model:shop.parcel:a:b"),
        (lambda: Parcel.objects.create(code=Color.RED), "model:shop.parcel:red"),
        (lambda: Voucher.objects.create(pk=uuid.UUID(int=7)), f"model:shop.voucher:{uuid.UUID(int=7)}"),
        (lambda: Weight.objects.create(kilograms=Decimal("1.50")), "model:shop.weight:1.5"),
        (lambda: Digest.objects.create(sum=b"\x00k"), "model:shop.digest:006b"),
        (lambda: Stock.objects.create(place=Place.HERE, article="a,b%"), "model:shop.stock:here,a%2Cb%25"),
        (lambda: ParcelLetter.objects.create(code="x", stamp=3), ("model:shop.letter:3", "model:shop.parcel:x")),
    ],
    ids=[
        "proxy",
        "grandchild",
        "child with a key of its own",
        "one-to-one",
        "text",
        "enum",
        "uuid",
        "decimal",
        "bytes",
        "composite",
        "two tables",
    ],
)
def test_name_is_the_same_however_the_row_is_reached(leases, make, name):
    """A new instance, a queryset and an instance with its key as text give the same name, or both of two tables."""
    made = make()

    for target in (made, type(made).objects.all()):
        with lock_for_update(target):
            pass
    if isinstance(made.pk, bytes):
        made.pk = memoryview(made.pk)  # as some databases return it
    elif not isinstance(made.pk, tuple):
        made.pk = str.__str__(made.pk) if isinstance(made.pk, str) else str(made.pk)
    with lock_for_update(made):
        pass

    assert {lease.names for lease in leases} == {name if isinstance(name, tuple) else (name,)}


@pytest.mark.django_db(databases=["default", "warehouse"])
def test_name_does_not_depend_on_the_database(leases):
    """A row has the same name in two databases, which may be one, but no block has rows of both."""
    local = Order.objects.create(pk=7, number="shop")
    stored = Order.objects.using("warehouse").create(pk=7, number="warehouse")

    with lock_for_update(Order.objects.using("warehouse")) as locked:
        assert [order.number for order in locked] == ["warehouse"]
        assert connections["warehouse"].in_atomic_block
    with lock_for_update(stored) as order:
        assert order.number == "warehouse"

    assert {lease.names for lease in leases} == {("model:shop.order:7",)}
    with pytest.raises(ValueError, match=r"in several databases \(default, warehouse\)"):
        lock_for_update([local, stored])


# Taken


@pytest.mark.django_db
def test_locked_rows_are_skipped_when_asked():
    """With ``skip_locked`` locked rows are left out; without it, who does not wait for one locks none."""
    orders = [Order.objects.create() for _ in range(3)]
    Order.objects.update(total=2)

    with lock(order_name(orders[1])).acquire():
        for target in (Order.objects.order_by("pk"), orders):
            with lock_for_update(target, skip_locked=True) as locked:
                assert locked == [orders[0], orders[2]]
                assert not is_free(order_name(orders[2]))
        for options in ({"nowait": True}, {"wait": 0.05}):
            with pytest.raises(LockTakenError):
                lock_for_update(Order.objects.all(), **options).__enter__()
            assert is_free(order_name(orders[0]))
    assert [order.total for order in orders] == [2, 0, 2]
    with lock(map(order_name, orders)):
        for target in (Order.objects, orders):
            with lock_for_update(target, skip_locked=True) as locked:
                assert locked == []

    assert all(map(is_free, map(order_name, orders)))


# Transactions


@pytest.mark.django_db(transaction=True)
def test_open_transaction_is_refused_before_the_lock_is_taken(leases):
    """Inside another transaction the lock would end before the commit: the error names the ways out."""
    order = Order.objects.create()

    match = r"Either move it out of atomic\(\).*Or .*select_for_update"
    with transaction.atomic(), pytest.raises(RuntimeError, match=match) as caught:
        lock_for_update(order).__enter__()
    transaction.set_autocommit(False)
    try:
        with pytest.raises(RuntimeError, match="autocommit is off"):
            lock_for_update(order).__enter__()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)

    assert "use @locked_view instead, or mark what the URL leads to (of a class, dispatch()) with @trans" in str(
        caught.value
    )
    assert "in a migration, set atomic = False" in str(caught.value)
    assert leases == []


class InsideTestCase(TestCase):
    """Django's TestCase is a transaction that does not count, as for ``atomic(durable=True)``."""

    def test_transaction_of_a_test_case_is_no_obstacle_and_one_inside_is(self):
        order = Order.objects.create()

        with lock_for_update(order):
            order.total = 3
            order.save()
        with transaction.atomic(), pytest.raises(RuntimeError, match="inside a transaction"):
            lock_for_update(order).__enter__()

        assert Order.objects.get().total == 3

    async def test_async_block_is_part_of_the_test_cases_transaction(self):
        order = await Order.objects.acreate()

        async def change_and_fail():
            async with lock_for_update(order):
                await Order.objects.aupdate(total=2)
                fail()

        with pytest.raises(ZeroDivisionError):
            await change_and_fail()
        async with lock_for_update(order):
            assert order.total == 0
            await Order.objects.aupdate(total=3)

        assert (await Order.objects.aget()).total == 3


@TWO_DATABASES
def test_two_databases_have_a_block_each(order):
    """A block of one database inside that of another locks and commits by itself; a failure inside rolls both back."""
    local = Order.objects.create(pk=order.pk + 1, total=1)

    def change_both(then):
        with lock_for_update(order), lock_for_update(local):
            change(order, total=2, then=lambda: change(local, total=2, then=then))

    with pytest.raises(ZeroDivisionError):
        change_both(fail)
    assert (Order.objects.get(pk=local.pk).total, total_seen_by_others(order)) == (1, 1)
    change_both(lambda: None)

    assert (Order.objects.get(pk=local.pk).total, total_seen_by_others(order)) == (2, 2)


@pytest.fixture
def order(transactional_db):
    """An order in the file, with a total of 1."""
    return Order.objects.using("warehouse").create(total=1)


@TWO_DATABASES
def test_lost_lock_rolls_back(order, leases):
    """A lease that ended before the commit rolls the changes back; later, the error says that they are kept."""
    with pytest.raises(LockLostError) as lost, lock_for_update(order):
        change(order, total=2, then=lambda: lose(leases[0]))
    with pytest.raises(ZeroDivisionError), lock_for_update(order):
        change(order, total=2, then=lambda: lose(leases[-1]) or fail())

    assert lost.value.reason == "superseded"
    assert not hasattr(lost.value, "__notes__")
    assert total_seen_by_others(order) == 1

    with pytest.raises(LockLostError) as lost, lock_for_update(order):
        change(order, total=2, then=lambda: transaction.on_commit(lambda: lose(leases[-1]), using="warehouse"))

    assert "already been committed" in lost.value.__notes__[0]
    assert total_seen_by_others(order) == 2


@TWO_DATABASES
def test_overtaken_holder_of_a_row_is_refused_by_the_database(order, leases):
    """When the database has seen a later holder of a row, the block does not begin, and the lease is lost."""
    with lock_for_update(order):
        pass
    Fence.objects.using("warehouse").update(token=2**53 - 2, owner="later")

    with pytest.raises(StaleTokenError, match=order_name(order)), lock_for_update(order):
        pytest.fail("entered")

    assert leases[-1].reason == "fenced"
    assert is_free(order_name(order))


# Asyncio


@TWO_DATABASES
async def test_async_block_locks_and_refreshes(async_connections, leases):
    """``async with`` takes the same lock, reads the rows again, and commits at its end what the block saved."""
    order = await Order.objects.using("warehouse").acreate(total=1)
    await Order.objects.using("warehouse").aupdate(total=2)

    async with lock_for_update(order) as locked:
        assert locked is order
        assert order.total == 2
        with pytest.raises(LockTakenError):
            await lock(order_name(order), wait=0).aacquire()
        order.total = 3
        await order.asave()
        assert await sync_to_async(total_seen_by_others)(order) == 2
    assert await sync_to_async(total_seen_by_others)(order) == 3
    everything = Order.objects.using("warehouse").all()
    async with lock_for_update(everything, nowait=True) as orders:
        assert [each.total for each in orders] == [3]
    for target in (everything.none(), everything):
        async with lock(order_name(order)), lock_for_update(target, skip_locked=True) as orders:
            assert orders == []

    assert {lease.names for lease in leases} == {(order_name(order),)}


@TWO_DATABASES
async def test_async_block_rolls_back_when_its_lock_was_lost(async_connections, leases):
    """The loss is raised at the end, and the changes of the block are undone."""
    order = await Order.objects.using("warehouse").acreate(total=1)

    with pytest.raises(LockLostError):
        async with lock_for_update(order):
            await sync_to_async(change)(order, total=2, then=lambda: lose(leases[0]))

    await order.arefresh_from_db()
    assert order.total == 1
    assert await sync_to_async(is_free)(order_name(order))


@TWO_DATABASES
async def test_cancelled_block_has_its_lock_until_its_transaction_has_ended(async_connections):
    """A cancellation does not end the commit in the thread, so the next holder waits for it, and reads new rows."""
    order = await Order.objects.using("warehouse").acreate(total=1)
    ends, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        ends.set()
        may_end.wait(30)

    async def block() -> None:
        async with lock_for_update(order):
            await sync_to_async(change)(order, total=2, then=lambda: transaction.on_commit(wait, using="warehouse"))

    task = asyncio.create_task(block())
    await asyncio.to_thread(ends.wait, 30)
    task.cancel()
    await asyncio.sleep(0.05)  # the lock would be free by then

    assert await lock(order_name(order), wait=0).atry_acquire() is None
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with lock(order_name(order), wait=0):
        await order.arefresh_from_db()
    assert order.total == 2


@TWO_DATABASES
async def test_async_block_refuses_an_open_transaction(async_connections, leases):
    """A transaction around the caller of asynchronous code is found in the thread that reaches the database."""
    order = await Order.objects.using("warehouse").acreate()

    def enter_inside_a_transaction():
        with transaction.atomic(using="warehouse"):
            async_to_sync(enter)()

    async def enter():
        async with lock_for_update(order):
            pytest.fail("entered")

    with pytest.raises(RuntimeError, match="inside a transaction"):
        await sync_to_async(enter_inside_a_transaction)()
    assert leases == []


async def test_blocking_block_in_an_event_loop_is_refused(leases):
    """Before any lock is taken, as Django refuses its database there."""
    row = Order(pk=7)
    row._state.db, row._state.adding = "default", False
    with pytest.raises(SynchronousOnlyOperation, match="async with lock_for_update"):
        lock_for_update(row).__enter__()

    assert leases == []
