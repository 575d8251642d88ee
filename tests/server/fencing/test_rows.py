"""Rows that record their latest writer: a bulk update never overwrites a later holder's row, however it is written."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from django.db import DatabaseError, connections, transaction
from django.db.models import F

from django_redlock import StaleTokenError
from tests.services import django_database
from tests.shop.models import CoolPallet, Crate, Label, NumberedPallet, Pallet, Parcel, Truck
from tests.waiting import wait_until

from .counting import prepare
from .sources import lease_of
from .test_experiment import options

MODELS = [Pallet, CoolPallet, Parcel, NumberedPallet, Crate, Label, Truck]
WAITING = {
    "postgresql": "SELECT 1 FROM pg_locks WHERE NOT granted",
    "mariadb": "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
}


@pytest.fixture
def pallets(engine, level, prepared, django_db_blocker) -> Iterator[str]:
    """The alias of a database at an isolation level, with two pallets that have two labels each and are on a truck."""
    with django_db_blocker.unblock(), ExitStack() as stack:
        entry = engine.settings(prepared.database(engine, prepare), OPTIONS=options(engine.scheme, level))
        stack.enter_context(django_database("pallets", entry))
        with connections["pallets"].schema_editor() as editor:
            for model in MODELS:
                editor.create_model(model)
        truck = Truck.objects.using("pallets").create()
        for _ in range(2):
            pallet = CoolPallet.objects.using("pallets").create()
            truck.pallets.add(pallet.pallet_ptr)
            for _ in range(2):
                pallet.labels.create()
        yield "pallets"
        with connections["pallets"].schema_editor() as editor:
            for model in reversed(MODELS):
                editor.delete_model(model)


SHAPES: dict[str, Callable] = {
    "plain": lambda alias: Pallet.objects.using(alias),
    "distinct": lambda alias: Pallet.objects.using(alias).distinct().order_by("weight"),
    "subquery": lambda alias: Pallet.objects.using(alias).filter(
        pk__in=Label.objects.using(alias).values("pallet").order_by()
    ),
    "join": lambda alias: Pallet.objects.using(alias).filter(labels__gt=0),
    "many-to-many": lambda alias: Truck.objects.using(alias).get().pallets,
    "child": lambda alias: CoolPallet.objects.using(alias),
}
LEVELS = [(engine, level) for engine in ("postgresql", "mariadb") for level in ("read committed", "repeatable read")]


def weights(alias: str) -> list[int]:
    return list(Pallet.objects.using(alias).order_by("pk").values_list("weight", flat=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("engine", "level"), LEVELS, indirect=["engine"])
def test_update_that_waited_for_a_later_holder_changes_nothing(pallets, engine, level, shape):
    """An earlier holder that waits for a row of a later one is refused, and leaves that row and all others alone."""
    expected = {"child": "TypeError"}.get(shape, "StaleTokenError")
    if (engine.scheme, level) == ("postgresql", "repeatable read") and shape != "child":
        expected = "OperationalError"  # a serialization failure

    assert overtaken(pallets, engine, SHAPES[shape]) == expected
    assert weights(pallets) == [0, 2]


def overtaken(alias: str, engine, rows: Callable) -> object:
    """Let a later holder set a weight to 2 while an earlier one sets all to 1; return what the earlier one gets."""
    early, late = lease_of("pallets", fencing_token=33), lease_of("pallets", fencing_token=34)
    last = Pallet.objects.using(alias).order_by("-pk")[0]

    def update() -> object:
        try:
            return rows(alias).fenced_update(early, weight=1)
        except (StaleTokenError, TypeError, DatabaseError) as error:
            return type(error).__name__
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic(using=alias):
            Pallet.objects.using(alias).filter(pk=last.pk).fenced_update(late, weight=2)
            got = pool.submit(update)
            # InnoDB looks again only if nobody has asked it for a tenth of a second.
            wait_until(lambda: got.done() or engine.execute(WAITING[engine.scheme]), pause=0.2)
        return got.result(60)


@pytest.mark.parametrize(("engine", "level"), [LEVELS[0], *LEVELS[2:]], indirect=["engine"])
def test_row_that_a_later_holder_takes_out_of_the_filter_is_left_alone(pallets, engine):
    """A row that no longer matches when the update reaches it is neither overwritten nor reported."""
    assert overtaken(pallets, engine, lambda alias: Pallet.objects.using(alias).filter(weight=0)) == 1
    assert weights(pallets) == [1, 2]


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "child"])
@pytest.mark.parametrize(("engine", "level"), LEVELS, indirect=["engine"])
def test_update_in_an_older_transaction_changes_nothing(pallets, engine, level, shape):
    """An outer transaction that began before a later holder wrote does not skip that holder's row in silence."""
    early, late = lease_of("pallets", fencing_token=33), lease_of("pallets", fencing_token=34)
    with django_database("other", connections[pallets].settings_dict), transaction.atomic(using=pallets):
        rows = list(Pallet.objects.using(pallets).order_by("pk"))
        Pallet.objects.using("other").filter(pk=rows[0].pk).fenced_update(late, weight=2)

        with pytest.raises((StaleTokenError, DatabaseError)) as raised:
            SHAPES[shape](pallets).fenced_update(early, weight=1)

        refused = isinstance(raised.value, StaleTokenError)
        assert refused or (engine.scheme, level) == ("postgresql", "repeatable read")
        if refused:
            assert weights(pallets)[1] == 0
        transaction.set_rollback(True, using=pallets)

    assert weights(pallets) == [2, 0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("engine", "level"), [*LEVELS[::2], ("sqlite", "DEFERRED")], indirect=["engine"])
def test_every_row_is_updated_once(pallets, shape):
    """Rows that a join finds twice are updated and counted once; rows of several tables are refused with advice."""
    lease, rows = lease_of("pallets"), SHAPES[shape](pallets)

    if shape == "child":
        with pytest.raises(TypeError, match=r"CoolPallet .*several tables.* with fenced\(lease\)"):
            rows.fenced_update(lease, degrees=5)
        return
    assert rows.fenced_update(lease, weight=F("weight") + 1) == 2
    assert weights(pallets) == [1, 1]
    with pytest.raises(StaleTokenError):
        rows.fenced_update(lease_of("pallets", fencing_token=lease.fencing_token - 1), weight=0)


@pytest.mark.parametrize(("engine", "level"), [*LEVELS[::2], ("sqlite", "DEFERRED")], indirect=["engine"])
def test_instance_that_was_read_before_saves_no_older_fence(pallets):
    """Otherwise an earlier holder could update the row again; a new row, and one of a fixture, have what was given."""
    rows = Pallet.objects.using(pallets)
    early, late = lease_of("a", 1), lease_of("a", 2)
    read_before = rows.first()
    rows.fenced_update(late, weight=F("weight") + 1)

    read_before.save()
    assert (read_before.get_deferred_fields(), read_before.fence_token) == (set(), 0)
    rows.bulk_update([read_before], ["weight"])

    with pytest.raises(StaleTokenError):
        rows.fenced_update(early, weight=F("weight") + 1)
    read_before.refresh_from_db()
    assert (read_before.fence_token, read_before.fence_owner) == (2, late.hold.owner())
    made = Pallet(fence_token=5)
    made.save(using=pallets)
    assert rows.get(pk=made.pk).fence_token == 5


@pytest.mark.parametrize(("engine", "level"), [*LEVELS[::2], ("sqlite", "DEFERRED")], indirect=["engine"])
def test_fence_in_the_table_of_a_child_protects_that_table(pallets):
    """A child with a fence of its own can be updated if no column of its parents is; so can rows with two keys."""
    late = lease_of("pallets", fencing_token=34)
    numbered, crates = NumberedPallet.objects.using(pallets), Crate.objects.using(pallets)
    numbered.create(code="1")
    crates.create(place="a", article="1")

    assert numbered.fenced_update(late, number=1) == 1
    assert numbered.filter(parcel_ptr__code="1").fenced_update(late, number=1) == 1
    assert crates.fenced_update(late, weight=1) == 1
    for rows, value in ((numbered, {"number": 2}), (crates, {"weight": 2})):
        with pytest.raises(StaleTokenError):
            rows.fenced_update(lease_of("pallets", fencing_token=33), **value)
    with pytest.raises(TypeError, match="several tables"):
        numbered.fenced_update(late, code="2")
