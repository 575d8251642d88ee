"""Look in the database for what must never happen."""

from collections import Counter

from .catalogue import read_catalogue
from .models import ImportRun, Order, StockItem


def overlapping_imports() -> list[tuple[ImportRun, ImportRun]]:
    """Return pairs of imports whose second one began before the first had ended."""
    overlaps = []
    latest: ImportRun | None = None  # the import so far that ended last
    for run in ImportRun.objects.order_by("started", "pk"):
        if latest and run.started < latest.ended:
            overlaps.append((latest, run))
        if latest is None or run.ended > latest.ended:
            latest = run
    return overlaps


def wrong_stock() -> dict[str, tuple[int, int]]:
    """Return, by SKU, the stock and the sum of deliveries minus sales, where they differ."""
    expected = Counter[str]()
    catalogue = read_catalogue()
    for booked in ImportRun.objects.values_list("rows", flat=True):
        for row in catalogue[:booked]:
            expected[row.sku] += row.delivered
    expected.subtract(Order.objects.values_list("item__sku", flat=True))
    actual = dict(StockItem.objects.values_list("sku", "stock"))
    return {
        sku: (actual.get(sku, 0), expected[sku])
        for sku in sorted(actual.keys() | expected.keys())
        if actual.get(sku, 0) != expected[sku]
    }
