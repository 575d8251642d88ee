"""Views that count, and would count wrong if two of them ran at once, or one of them read uncommitted data."""

import asyncio
import time

from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.views import View

from django_redlock import lock_for_update, locked_view
from tests.shop.models import Order

PATIENCE = 60.0  # seconds
THINKING = 0.005  # seconds between reading and writing


def count_once(pk: int) -> JsonResponse:
    order = Order.objects.get(pk=pk)
    seen = order.total
    time.sleep(THINKING)
    order.total = seen + 1
    order.save()
    return JsonResponse({"seen": seen, "atomic": connection.in_atomic_block})


@locked_view("order:{pk}", wait=PATIENCE)
def count(request: HttpRequest, pk: int) -> JsonResponse:
    return count_once(pk)


@locked_view("order:{pk}", wait=PATIENCE)
class Count(View):
    def post(self, request: HttpRequest, pk: int) -> JsonResponse:
        return count_once(pk)


@transaction.non_atomic_requests
async def acount(request: HttpRequest, pk: int) -> JsonResponse:
    """Django has no ATOMIC_REQUESTS for asynchronous views; the block is the transaction."""
    order = await Order.objects.aget(pk=pk)
    async with lock_for_update(order, wait=PATIENCE):
        seen = order.total
        await asyncio.sleep(THINKING)
        order.total = seen + 1
        await order.asave()
        return JsonResponse({"seen": seen, "atomic": True})


def compute(seconds: float) -> None:
    """Keep the processor busy; other threads take turns, but no other task does."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@transaction.non_atomic_requests
@locked_view("busy:{pk}")
def busy(request: HttpRequest, pk: int) -> JsonResponse:
    """Compute for a while, under a lock that no other request wants."""
    compute(THINKING)
    return JsonResponse({})


@transaction.non_atomic_requests
@locked_view("busy:{pk}")
async def abusy(request: HttpRequest, pk: int) -> JsonResponse:
    """Do the same, so that no other task of the event loop has a turn meanwhile."""
    compute(THINKING)
    return JsonResponse({})
