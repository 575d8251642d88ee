"""Writes that do not come through the fence, rows that know their latest writer, and old fences."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connections, transaction
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.db.models import F
from django.db.models.signals import pre_delete
from django.utils import timezone

from django_redlock import LockLostError, StaleTokenError, fenced
from django_redlock.checks import check_databases, check_fence_tables
from django_redlock.models import Fence
from django_redlock.operations import RequireFence
from tests.services import django_database
from tests.shop.models import Order, Pallet, Parcel, Voucher

from .sources import claim, lease_of


@pytest.fixture
def shop(counting) -> Iterator[str]:
    """The alias of a database with tables of the shop."""
    models = [Order, Voucher, Parcel, Pallet]
    with connections[counting].schema_editor() as editor:
        for model in models:
            editor.create_model(model)
    yield counting
    with connections[counting].schema_editor() as editor:
        for model in models:
            editor.delete_model(model)


def migrate(alias: str, operation: Operation, forwards: bool = True) -> None:
    state = ProjectState.from_apps(apps)
    with connections[alias].schema_editor() as editor:
        if forwards:
            operation.database_forwards("shop", editor, state, state)
        else:
            operation.database_backwards("shop", editor, state, state)


postgresql_only = pytest.mark.parametrize("engine", ["postgresql"], indirect=True)


@postgresql_only
@pytest.mark.parametrize("lock", ["", "orders"])
def test_protected_table_takes_fenced_writes_only(shop, lock):
    """A protected table refuses every kind of write from a transaction without a claim of its lock."""
    migrate(shop, RequireFence("Order", lock))
    orders = Order.objects.using(shop)

    with fenced(lease_of("orders"), using=shop):
        orders.create(number="1")
        orders.update(number="2")
    for write in (
        lambda: orders.create(number="3"),
        lambda: orders.update(number="3"),
        lambda: orders.all()._raw_delete(shop),
        lambda: connections[shop].cursor().execute("TRUNCATE shop_order"),
    ):
        with pytest.raises(IntegrityError, match=r"shop_order takes writes only .* with fenced\(lease\)"):
            write()

    if lock:
        with pytest.raises(IntegrityError), fenced(lease_of("parcels"), using=shop):
            orders.create()
        with fenced(lease_of(["orders", "parcels"]), using=shop):
            orders.update(number="3")
    claim(lease_of("orders"), shop)
    with pytest.raises(IntegrityError):
        orders.update(number="4")

    assert orders.get().number == ("3" if lock else "2")


@postgresql_only
@pytest.mark.parametrize(("model", "lock"), [(Order, "model:shop.order:{id}"), (Parcel, "parcel:{code}:{{x}}")])
def test_protected_row_wants_the_fence_of_its_own_lock(shop, model, lock):
    """With a column in the lock's name, each row needs its own fence, for the old values and for the new ones."""
    migrate(shop, RequireFence(model.__name__, lock))
    rows, ours, theirs = model.objects.using(shop), *(lease_of(lock.format(id=key, code=key)) for key in (7, 8))

    with fenced(ours, using=shop):
        rows.create(pk=7)
    claim(theirs, shop)
    with pytest.raises(IntegrityError, match="to this row only"), fenced(ours, using=shop):
        rows.create(pk=8)
    with pytest.raises(IntegrityError), fenced(theirs, using=shop):
        rows.filter(pk=7)._raw_delete(shop)
    with pytest.raises(IntegrityError), fenced(ours, using=shop):
        rows.filter(pk=7).update(**{model._meta.pk.name: 8})
    with pytest.raises(IntegrityError):
        connections[shop].cursor().execute(f"TRUNCATE {model._meta.db_table}")

    with fenced([ours, theirs], using=shop):
        rows.filter(pk=7).update(**{model._meta.pk.name: 8})
    assert [str(pk) for pk in rows.values_list("pk", flat=True)] == ["8"]

    migrate(shop, RequireFence("Voucher", "model:shop.voucher:{id}"))
    voucher = Voucher()  # its key is a UUID, which is written as Python writes it
    with fenced(lease_of(f"model:shop.voucher:{voucher.pk}"), using=shop):
        voucher.save(using=shop, force_insert=True)


@postgresql_only
def test_claim_of_a_rolled_back_savepoint_does_not_count(shop):
    """After the rollback of a nested claim the table is closed again."""
    migrate(shop, RequireFence("Order"))
    lease = lease_of("orders")
    claim(lease, shop)

    def fail_inside() -> None:
        with fenced(lease, using=shop, nested=True):
            raise ZeroDivisionError

    with transaction.atomic(using=shop):
        with pytest.raises(ZeroDivisionError):
            fail_inside()
        with pytest.raises(IntegrityError), transaction.atomic(using=shop):
            Order.objects.using(shop).create()


def test_protection_is_removed_backwards(shop, engine):
    """The operation can be applied again, and reversed; databases other than PostgreSQL are left as they are."""
    operation = RequireFence("Order", "order:{id}")
    migrate(shop, operation)
    migrate(shop, operation)
    if engine.scheme != "postgresql":
        Order.objects.using(shop).create()
    migrate(shop, operation, forwards=False)

    Order.objects.using(shop).create()

    assert operation.describe() == "Require a fence for writes to Order"
    assert operation.migration_name_fragment == "order_require_fence"
    assert operation.deconstruct() == ("RequireFence", ("Order", "order:{id}"), {})


def test_rows_know_their_latest_writer(shop):
    """A bulk update touches no row of a later holder, or of another one with the same token: all or nothing."""
    pallets = Pallet.objects.using(shop)
    for _ in range(3):
        pallets.create()
    early, late, twin = (lease_of("pallets", fencing_token=token) for token in (33, 34, 34))
    first = pallets.order_by("pk").first()

    assert pallets.fenced_update(early, weight=F("weight") + 1) == 3
    assert pallets.filter(pk=first.pk).fenced_update(late, weight=10) == 1
    for overtaken in (early, twin):
        with pytest.raises(StaleTokenError):
            pallets.fenced_update(overtaken, weight=0)

    assert sorted(pallets.values_list("weight", flat=True)) == [1, 1, 10]
    assert (early.reason, twin.reason, late.reason) == ("fenced", "fenced", None)
    assert async_to_sync(pallets.afenced_update)(late, weight=2) == 3
    with pytest.raises(ValueError, match="take it exclusively"):
        pallets.fenced_update(lease_of("pallets", shared=True), weight=1)
    late.release()
    with pytest.raises(LockLostError):
        pallets.fenced_update(late, weight=1)


def test_old_fences_are_pruned(counting):
    """redlock_prune_fences deletes only fences that nobody claimed for the given number of days."""
    old, young = lease_of("old"), lease_of("young")
    for lease in (old, young):
        claim(lease, counting)
    fences = Fence.objects.using(counting)
    fences.filter(name="old").update(updated=timezone.now() - timedelta(days=91))

    assert prune(counting, "--dry-run") == "Dry run: 1 fence would be deleted."
    assert prune(counting, "--older-than", "92") == "Deleted 0 fences."
    assert prune(counting) == "Deleted 1 fence."

    assert [fence.name for fence in fences.all()] == ["young"]
    claim(old, counting)
    fences.all().delete()
    assert prune(counting) == "Deleted 0 fences."
    for wrong, text in (("--older-than=1000000", "at most 36500 days"), ("--database=nope", "DATABASES has no 'nope'")):
        with pytest.raises(CommandError, match=text):
            call_command("redlock_prune_fences", wrong, skip_checks=True)


def test_fence_that_is_claimed_meanwhile_is_not_pruned(counting):
    """A project may listen to what is deleted; Django then reads the rows before it deletes them, which takes time."""
    fences, claimed = Fence.objects.using(counting), []

    def claim_meanwhile(**about: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(claim, lease_of("old", 9), counting).result()
            pool.submit(connections.close_all).result()
        claimed.append(9)

    claim(lease_of("old", 1), counting)
    fences.update(updated=timezone.now() - timedelta(days=91))
    pre_delete.connect(claim_meanwhile)
    try:
        prune(counting)
    finally:
        pre_delete.disconnect(claim_meanwhile)

    assert [fence.token for fence in fences.all()] == claimed


def prune(alias: str, *options: str) -> str:
    out = StringIO()
    call_command("redlock_prune_fences", *options, database=alias, stdout=out, skip_checks=True)
    return out.getvalue().strip()


def test_settings_of_a_database_are_checked():
    """redlock.E031 is about a claim that cannot count its matches, redlock.W031 about levels that conflict."""
    from psycopg import IsolationLevel as Level

    assert checked("mysql", {"client_flag": 0}) == checked("mysql", {"client_flag": 4 | 8}) == ["redlock.E031"]
    assert checked("mysql", {"isolation_level": "repeatable read"}) == ["redlock.W031"]
    assert checked("mysql", {"isolation_level": None}) == ["redlock.W031"]
    assert checked("postgresql", {"isolation_level": Level.SERIALIZABLE}) == ["redlock.W031"]
    assert checked("postgresql", {"isolation_level": Level.READ_COMMITTED}) == checked("postgresql", {}) == []
    assert checked("mysql", {"client_flag": 2 | 4}) == checked("mysql", {}) == []
    assert checked("sqlite3", {"isolation_level": "x"}) == []


def checked(engine: str, options: dict) -> list[str]:
    """Return the ids of the checks that a database's settings trigger."""
    connections.settings["checked"] = {"ENGINE": f"django.db.backends.{engine}", "OPTIONS": options}
    try:
        return [message.id for message in check_databases()]
    finally:
        del connections.settings["checked"]


@pytest.mark.parametrize("engine", ["mariadb"], indirect=True)
def test_table_without_transactions_is_an_error(engine, django_db_blocker):
    """redlock.E032: a storage engine that cannot roll back makes the fence worthless."""
    with django_db_blocker.unblock(), engine.database() as name, django_database("myisam", engine.settings(name)):
        assert check_fence_tables(databases=["myisam"]) == []
        call_command("migrate", "redlock", database="myisam", verbosity=0)
        assert check_fence_tables(databases=["myisam"]) == []
        connections["myisam"].cursor().execute("ALTER TABLE redlock_fence ENGINE = MyISAM")

        assert [message.id for message in check_fence_tables(databases=["myisam"])] == ["redlock.E032"]
