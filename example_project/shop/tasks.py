"""
The import of the catalogue: work that must not run twice at once.

Every import books one delivery. Two at the same time would book it twice, so the task is a singleton: a call while an
import is waiting or running joins that import.
"""

import os

from django.conf import settings
from django.utils import timezone

from django_redlock.celery import SingletonTask, singleton_task
from django_redlock.querysets import lock_for_update

from .catalogue import Row, fetch_catalogue
from .models import ImportRun, StockItem


# A lease is shorter than an import: it is renewed while the import runs. When the worker dies, the next import can
# start five seconds later.
@singleton_task(bind=True, lease=5, on_duplicate="join")
def import_catalogue(self: SingletonTask[[], int]) -> int:
    """Book one delivery of everything in the catalogue; returns the number of rows."""
    run = ImportRun.objects.create(task_id=self.request.id, worker_pid=os.getpid())
    for row in fetch_catalogue(settings.SHOP_IMPORT_SECONDS):
        # Somebody may have released the lock in the admin. Then another import may be running by now, and this one must
        # end.
        self.singleton.check()
        book(run, row)
    run.finished = timezone.now()
    run.save()
    return run.rows


def book(run: ImportRun, row: Row) -> None:
    """Put one row's delivery on the shelf, while customers take things from it."""
    item, _ = StockItem.objects.get_or_create(sku=row.sku, defaults={"name": row.name, "price": row.price})
    # The block is a transaction, and `item` is read again under the lock, so `+=` overwrites no sale.
    with lock_for_update(item, wait=10) as item:
        item.name, item.price = row.name, row.price
        item.stock += row.delivered
        item.save()
        run.rows += 1
        run.save()
