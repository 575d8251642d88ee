"""A task of the shop for the picture of a terminal: one order of a customer is packed at a time."""

import time

from shop_site.celery import app as app

from django_redlock.celery import singleton_task

ORDERS = ("anna",) * 10 + ("ben",) * 4 + ("chen",) * 2


@singleton_task(name="shop.pack", key=("customer",), scope="while_executing", lease=5, queue="parcels")
def pack(customer: str, order: int) -> None:
    """Pack one order."""
    time.sleep(1)


def send() -> None:
    """Call the task for all orders at once."""
    for order, customer in enumerate(ORDERS):
        pack.delay(customer, order)
