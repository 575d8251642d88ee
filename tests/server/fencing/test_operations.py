"""RequireFence: which rows need a fence, whose fence it is, and what a later migration changes about it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connections, models
from django.db.migrations import AddField, AlterField, RemoveField, RenameField
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.test.utils import _TestState

from django_redlock import fenced, lock_for_update
from django_redlock.operations import RequireFence
from tests.services import django_database
from tests.shop.models import GiftOrder, Order, Parcel, Stock, Voucher, Weight

from .counting import prepare
from .sources import lease_of

MODELS = [Order, GiftOrder, Voucher, Parcel, Stock, Weight]
TABLE = Order._meta.db_table
postgresql_only = pytest.mark.parametrize("engine", ["postgresql"], indirect=True)


class Migrations:
    """The migrations of the app ``shop`` in one database: each operation is a step forwards, or the last one back."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._states = [ProjectState.from_apps(apps)]
        self._steps: list[Operation] = []

    def forwards(self, *operations: Operation) -> None:
        for operation in operations:
            state = self._states[-1].clone()
            operation.state_forwards("shop", state)
            with connections[self.alias].schema_editor() as editor:
                operation.database_forwards("shop", editor, self._states[-1], state)
            self._states.append(state)
            self._steps.append(operation)

    def backwards(self) -> None:
        state, operation = self._states.pop(), self._steps.pop()
        with connections[self.alias].schema_editor() as editor:
            operation.database_backwards("shop", editor, state, self._states[-1])


@contextmanager
def tables(alias: str) -> Iterator[None]:
    with connections[alias].schema_editor() as editor:
        for model in MODELS:
            editor.create_model(model)
    yield
    with connections[alias].schema_editor() as editor:
        for model in reversed(MODELS):
            editor.delete_model(model)


@pytest.fixture
def shop(counting) -> Iterator[Migrations]:
    """The migrations of a database of each kind in turn."""
    with tables(counting):
        yield Migrations(counting)


def refused(write, match: str = "takes writes") -> None:
    with pytest.raises(IntegrityError, match=f"table .*{match}"):
        write()


@pytest.mark.parametrize(
    ("model", "lock"),
    [
        (Order, "model:shop.order:{id}"),
        (Voucher, "model:shop.voucher:{pk}"),
        (GiftOrder, "model:shop.order:{order_ptr}"),
    ],
)
def test_new_row_needs_no_fence_if_its_key_is_made_for_it(shop, engine, model, lock):
    """Nobody can hold the lock of a row that does not exist; but a row that was locked needs its fence to come back."""
    alias = shop.alias
    shop.forwards(RequireFence(model.__name__, lock=lock))
    rows, holder = model.objects.using(alias), lease_of(model.__name__)

    alone = rows.create()
    with fenced(holder, using=alias):  # of another lock
        other = rows.create()
    assert rows.count() == 2
    if engine.scheme != "postgresql":
        return

    refused(lambda: rows.filter(pk=other.pk)._raw_delete(alias), "takes writes to this row only")
    mine = lease_of(lock.format(pk=alone.pk, id=alone.pk, order_ptr=alone.pk))
    with fenced(mine, using=alias):
        rows.filter(pk=alone.pk)._raw_delete(alias)
    refused(alone.save, "takes writes to this row only")
    with fenced(mine, using=alias):
        alone.save()


@postgresql_only
def test_new_row_needs_the_fence_of_a_key_that_the_caller_chose(shop):
    """A key that the caller chooses can be locked before the row exists, as can a group: their fences are needed."""
    alias = shop.alias
    shop.forwards(
        RequireFence("Parcel", lock="model:shop.parcel:{code}"),
        RequireFence("Stock", lock="model:shop.stock:{pk}"),
        RequireFence("Order", lock="number:{number}"),
    )

    for name, create in (
        ("model:shop.parcel:7", lambda: Parcel.objects.using(alias).create(code="7")),
        ("model:shop.stock:a,1", lambda: Stock.objects.using(alias).create(place="a", article="1")),
        ("number:7", lambda: Order.objects.using(alias).create(number="7")),
    ):
        refused(create, f'takes writes to this row only .* of "{name}"')
        with fenced(lease_of(name), using=alias):
            create()


@pytest.mark.parametrize("lock", ["model:shop.stock:{pk}", "model:shop.stock:{place},{article}"])
def test_composite_key_names_the_lock_of_lock_for_update(shop, lock):
    """Commas and percent signs in the parts of a key are escaped as lock_for_update() does."""
    shop.forwards(RequireFence("Stock", lock=lock))
    for place, article in (("a,b", "50%"), ("%2C", ","), ("ü", "")):
        escaped = [part.replace("%", "%25").replace(",", "%2C") for part in (place, article)]
        name = f"model:shop.stock:{','.join(escaped)}"
        with fenced(lease_of(name), using=shop.alias):
            Stock.objects.using(shop.alias).create(place=place, article=article)

        with lock_for_update(Stock.objects.using(shop.alias).get(place=place, article=article)) as stock:
            stock.count += 1
            stock.save()

    assert list(Stock.objects.using(shop.alias).values_list("count", flat=True)) == [1, 1, 1]


@postgresql_only
def test_table_of_another_schema_can_go(shop):
    """The tables of each tenant may be in a schema of its own, with the fences in a common one."""
    with connections[shop.alias].cursor() as cursor:
        for tenant in ("first", "last"):
            cursor.execute(f"CREATE SCHEMA {tenant}")
            cursor.execute(f"SET search_path TO {tenant}, public")
            cursor.execute(f"CREATE TABLE {tenant}.{TABLE} (LIKE public.{TABLE} INCLUDING ALL)")
            shop.forwards(RequireFence("Order", lock="orders"))
        cursor.execute("DROP SCHEMA last CASCADE")
        cursor.execute("SET search_path TO first, public")

        refused(Order.objects.using(shop.alias).create)
        with fenced(lease_of("orders"), using=shop.alias):
            Order.objects.using(shop.alias).create()

        cursor.execute("DROP SCHEMA first CASCADE")
        cursor.execute("SET search_path TO public")


@postgresql_only
def test_lock_of_a_template_of_its_own_is_not_escaped(shop):
    """A column that is not the key of a row's lock stands in a name as it is."""
    shop.forwards(RequireFence("Stock", lock="stock:{place}"))

    with fenced(lease_of("stock:a,b"), using=shop.alias):
        Stock.objects.using(shop.alias).create(place="a,b", article="1")


@postgresql_only
def test_one_step_back_is_one_step_back(shop):
    """The last operation for a model counts, also with a renamed column, and each step back restores the one before."""
    alias = shop.alias
    shop.forwards(
        RequireFence("Order", lock="orders"),
        RequireFence("Order", lock="order:{number}"),
        RenameField("order", "number", "code"),
        AddField("order", "number", models.CharField(max_length=20, default="")),
        AlterField("order", "code", models.CharField(max_length=30, default="")),
        RequireFence("Order", lock="order:{total}"),
    )

    def insert(number: str) -> None:
        with connections[alias].cursor() as cursor:
            names = {column.name for column in connections[alias].introspection.get_table_description(cursor, TABLE)}
            values = {"total": 5, "paid": False, "code": number, "number": "9" if "code" in names else number}
            found = {name: value for name, value in values.items() if name in names}
            places = ", ".join(["%s"] * len(found))
            cursor.execute(f"INSERT INTO {TABLE} ({', '.join(found)}) VALUES ({places})", list(found.values()))

    def insert_with(lock: str, number: str = "7") -> None:
        with fenced(lease_of(lock), using=alias):
            insert(number)

    def only(lock: str) -> None:
        for each in ("orders", "order:7", "order:5"):
            if each == lock:
                insert_with(each)
            else:
                refused(lambda each=each: insert_with(each))

    only("order:5")
    shop.backwards()
    only("order:7")  # the column has another name now
    shop.backwards()
    shop.backwards()
    only("order:7")
    shop.backwards()
    only("order:7")
    shop.backwards()
    only("orders")
    shop.backwards()
    insert("8")


def test_one_step_back_from_the_same_lock_again_leaves_the_table_closed(shop, engine):
    """Two operations with one lock are two steps: the table stays closed until both are gone."""
    orders = Order.objects.using(shop.alias)
    again = RequireFence("Order", lock="orders")
    shop.forwards(again, again, RequireFence("Order", lock="other"), again)

    for lock in ("orders", "other", "orders", "orders"):
        if engine.scheme == "postgresql":
            refused(orders.create)
        with fenced(lease_of(lock), using=shop.alias):
            orders.create()
        shop.backwards()
    orders.create()

    assert orders.count() == 5


@postgresql_only
def test_removed_column_leaves_the_table_closed(shop):
    """Without the column that names the lock, and where it is NULL, writes are refused with the column's name."""
    shop.forwards(
        RequireFence("Order", lock="order:{number}"),
        AlterField("order", "number", models.CharField(max_length=20, null=True)),
    )
    insert = "INSERT INTO shop_order (total, paid) VALUES (5, false)"
    refused(lambda: connections[shop.alias].cursor().execute(insert), 'column "number" names its lock and is NULL')
    shop.forwards(RemoveField("order", "number"))
    refused(lambda: connections[shop.alias].cursor().execute(insert), 'column "number" .* gone: write RequireFence')

    with connections[shop.alias].schema_editor() as editor:
        editor.execute("ALTER TABLE shop_order ADD number varchar(20)")


@pytest.mark.parametrize(
    ("model", "lock", "why"),
    [
        ("GiftOrder", "model:shop.order:{id}", r"'id' is in the table of Order; write '{pk}'"),
        ("Order", "order:{numbr}", "no column 'numbr'; it has id, number, total, paid"),
        ("Order", "order:{}", "no column ''"),
        ("Order", "order:{paid}", "'paid' is a BooleanField"),
        ("Weight", "weight:{pk}", "'kilograms' is a DecimalField"),
        ("Order", "order:{id:05}", "'id' has a conversion or a format"),
        ("Order", "order:{id", "no format string"),
    ],
)
def test_operation_that_cannot_work_is_refused(shop, model, lock, why):
    """A migration is refused on every database, with the reason, if nobody could hold the lock that it names."""
    with pytest.raises(ValueError, match=rf"RequireFence\('{model}', .*would refuse every write: .*{why}"):
        shop.forwards(RequireFence(model, lock=lock))


@postgresql_only
@pytest.mark.parametrize("lock", ["", "orders", "order:{number}"])
def test_partition_is_protected_as_its_table(counting, lock):
    """A write to a partition is refused as one to its table is, also in a partition that is made later."""
    with connections[counting].cursor() as cursor:
        cursor.execute(
            "CREATE TABLE shop_order (gone int, id int GENERATED BY DEFAULT AS IDENTITY, number varchar(20), total int,"
            " paid bool) PARTITION BY RANGE (id)"
        )
        cursor.execute("ALTER TABLE shop_order DROP COLUMN gone")
        cursor.execute("CREATE TABLE early PARTITION OF shop_order FOR VALUES FROM (0) TO (100)")
        Migrations(counting).forwards(RequireFence("Order", lock=lock))
        cursor.execute("CREATE TABLE late PARTITION OF shop_order FOR VALUES FROM (100) TO (200)")
        cursor.execute("ALTER TABLE shop_order RENAME number TO code")

        for table, key in (("shop_order", 1), ("early", 2), ("late", 100)):
            insert = f"INSERT INTO {table} (id, code, total, paid) VALUES ({key}, '7', 0, false)"
            refused(lambda insert=insert: cursor.execute(insert))
            with fenced(lease_of("order:7" if "{" in lock else lock or "any"), using=counting):
                cursor.execute(insert)
            refused(lambda table=table: cursor.execute(f"DELETE FROM {table}"))
        cursor.execute("DROP TABLE shop_order")


@postgresql_only
@pytest.mark.parametrize("lock", ["", "orders", "model:shop.order:{id}"])
def test_only_a_test_database_can_be_emptied(engine, lock, django_db_blocker, monkeypatch):
    """Tests can empty the tables of a database that was made for them; all other writes and databases are refused."""

    def flush() -> None:
        call_command("flush", database="emptied", interactive=False, verbosity=0, inhibit_post_migrate=True)

    with django_db_blocker.unblock(), engine.database() as name:
        engine.execute(f"CREATE DATABASE test_{name}")
        for database, testing in ((f"test_{name}", True), (name, True), (f"test_{name}", False)):
            with monkeypatch.context() as patch, django_database("emptied", engine.settings(database)):
                if not testing:
                    patch.delattr(_TestState, "saved_data")
                if testing:
                    prepare("emptied")
                with tables("emptied"):
                    Migrations("emptied").forwards(RequireFence("Order", lock=lock))
                    with fenced(lease_of(lock.format(id=7) or "any"), using="emptied"):
                        Order.objects.using("emptied").create(id=7)
                    refused(lambda: Order.objects.using("emptied").update(total=1))
                    if testing and database.startswith("test_"):
                        flush()
                        assert not Order.objects.using("emptied").exists()
                    else:
                        with pytest.raises(CommandError):
                            flush()
        engine.execute(f"DROP DATABASE test_{name} WITH (FORCE)")
