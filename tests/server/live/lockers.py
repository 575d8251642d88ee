"""
A process that locks overlapping sets of rows for some seconds: ``python -m tests.server.live.lockers SECONDS ORDER``.

It prints a line when it is ready, begins when it reads one, and at the end prints how often it locked a set.
"""

import random
import sys
import time

import django

ROWS = 12
SET = 7  # of twelve rows: any two sets have rows in common


def main(seconds: float, reverse: bool) -> int:
    from django_redlock import lock_for_update
    from tests.shop.models import Order

    locked = 0
    end = time.monotonic() + seconds
    while not locked or time.monotonic() < end:
        chosen = random.sample(range(1, ROWS + 1), SET)
        orders = sorted(Order.objects.filter(pk__in=chosen), key=lambda order: order.pk, reverse=reverse)
        with lock_for_update(orders):
            for order in orders:
                order.total += 1
                order.save()
        locked += 1
    return locked


if __name__ == "__main__":
    django.setup()
    print("ready", flush=True)
    sys.stdin.readline()
    print(main(float(sys.argv[1]), sys.argv[2] == "backwards"), flush=True)
