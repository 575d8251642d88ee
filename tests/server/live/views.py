"""Views that count, and would count wrong if two of them ran at once, or one of them read uncommitted data."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.utils.decorators import sync_and_async_middleware
from django.views import View

from django_redlock import lock_for_update, locked_view
from django_redlock.middleware import locked_paths
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


# Requests whose clients go away while they work in a thread; the test waits for the events, and sets the last one.

events = {"begun": Event(), "cancelled": Event(), "over": Event()}
one_at_a_time = locked_paths(["/left/"], "path")


@contextmanager
def cancellation_noticed() -> Iterator[None]:
    try:
        yield
    except asyncio.CancelledError:
        events["cancelled"].set()
        raise


@sync_and_async_middleware
def notices_cancellation(get_response: Any) -> Any:
    if not iscoroutinefunction(get_response):
        return get_response

    async def middleware(request: HttpRequest) -> Any:
        with cancellation_noticed():
            return await get_response(request)

    return middleware


@transaction.non_atomic_requests
def left(request: HttpRequest) -> JsonResponse:
    """Work in the thread of the request, until the test says that the work is over."""
    events["begun"].set()
    events["over"].wait(PATIENCE)
    return JsonResponse({})


@transaction.non_atomic_requests
@locked_view("path")
async def aleft(request: HttpRequest) -> JsonResponse:
    with cancellation_noticed():
        return await sync_to_async(left)(request)


@transaction.non_atomic_requests
def event(request: HttpRequest, name: str, what: str) -> JsonResponse:
    return JsonResponse({"answer": getattr(events[name], what)(*[PATIENCE][: what == "wait"])})


urlpatterns = [
    path("count/<int:pk>/", count),
    path("count-class/<int:pk>/", Count.as_view()),
    path("acount/<int:pk>/", acount),
    path("busy/<int:pk>/", busy),
    path("abusy/<int:pk>/", abusy),
    path("left/", left),
    path("aleft/", aleft),
    path("event/<str:name>/<str:what>/", event),
]
