import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from shop.audit import overlapping_imports, wrong_stock
from shop.models import ImportRun, Order


class Command(BaseCommand):
    help = "Check that no two imports overlapped, and that the stock is what was delivered less what was sold."

    def handle(self, **options: Any) -> None:
        overlaps = [[before.pk, run.pk] for before, run in overlapping_imports()]
        wrong = wrong_stock()
        found = {
            "imports": [{"task_id": run.task_id, "seconds": seconds(run)} for run in ImportRun.objects.all()],
            "orders": Order.objects.count(),
            "overlapping_imports": overlaps,
            "wrong_stock": wrong,
        }
        self.stdout.write(json.dumps(found))
        if overlaps or wrong:
            raise CommandError("The shop's books are wrong.")


def seconds(run: ImportRun) -> float | None:
    """Return how long an import took; None if it did not finish."""
    return (run.finished - run.started).total_seconds() if run.finished else None
