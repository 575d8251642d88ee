"""The shop's one page, and what its buttons do."""

import time

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_POST

from django_redlock.querysets import lock_for_update
from django_redlock.views import locked_view

from .models import ImportRun, Order, StockItem
from .tasks import import_catalogue


@require_GET
def front(request: HttpRequest) -> HttpResponse:
    """Show the catalogue and the last imports."""
    items, imports = StockItem.objects.all(), ImportRun.objects.all()[:5]
    if wants_json(request):
        return JsonResponse({"items": list(items.values()), "imports": list(imports.values())})
    return render(request, "shop/front.html", {"items": items, "imports": imports})


@require_POST
@login_required
@locked_view("checkout:{request.user.pk}")
def checkout(request: HttpRequest, sku: str) -> HttpResponse:
    """Sell one piece. A second click while the first is being paid for is answered 409 and sells nothing."""
    order = sell(get_object_or_404(StockItem, sku=sku), request.user)
    if order is None:
        return answer(request, {"sold_out": sku}, f"Sorry, {sku} is sold out.", status=410)
    pay(order)
    return answer(request, {"order": order.pk}, f"Thank you: {order.item} is yours.", status=201)


@require_POST
@login_required
def start_import(request: HttpRequest) -> HttpResponse:
    """Submit an import. While one is waiting or running, the call joins it."""
    result = import_catalogue.delay()
    said = "joined the import that is waiting or running" if result.duplicate else "asked for an import"
    return answer(request, {"task": result.id, "duplicate": result.duplicate}, f"You {said}.", status=202)


def sell(item: StockItem, buyer: object) -> Order | None:
    """Take one piece off the shelf, or return None when there is none left."""
    with lock_for_update(item, wait=10) as item:
        if item.stock == 0:
            return None
        item.stock -= 1
        item.save()
        return Order.objects.create(item=item, buyer=buyer, price=item.price)


def pay(order: Order) -> None:
    """Charge the customer. This takes a while, and the shelf is not locked meanwhile."""
    time.sleep(settings.SHOP_PAYMENT_SECONDS)


def answer(request: HttpRequest, data: dict[str, object], text: str, status: int) -> HttpResponse:
    """Respond to programs with JSON, and to people with a message on the front page."""
    if wants_json(request):
        return JsonResponse(data, status=status)
    messages.info(request, text)
    return redirect("front")


def wants_json(request: HttpRequest) -> bool:
    """Return whether the client is a program."""
    return request.get_preferred_type(["text/html", "application/json"]) == "application/json"
