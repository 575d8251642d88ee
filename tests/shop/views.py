"""Views under locks; ``during`` is a hook for a test inside them."""

from collections.abc import Callable
from io import BytesIO
from typing import Any

from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from django.views.decorators.csrf import csrf_exempt

from django_redlock import lock, locked_view

from .models import Order


class During:
    """The hook that runs inside the views."""

    action: Callable[[], Any] = staticmethod(lambda: None)


def save_as_paid(pk: int) -> HttpResponse:
    Order.objects.using("warehouse").filter(pk=pk).update(paid=True)
    During.action()
    return HttpResponse("paid")


@csrf_exempt
@locked_view("order:{pk}")
def pay(request: HttpRequest, pk: int) -> HttpResponse:
    return save_as_paid(pk)


@locked_view("order:{pk}")
def touch(request: HttpRequest, pk: int) -> HttpResponse:
    During.action()
    return HttpResponse("touched")


@locked_view("order:{pk}")
async def apay(request: HttpRequest, pk: int) -> HttpResponse:
    During.action()
    return HttpResponse("paid")


@locked_view("order:{pk}")
def stream(request: HttpRequest, pk: int) -> StreamingHttpResponse:
    return StreamingHttpResponse(iter([b"one", b"two"]))


@locked_view("order:{pk}")
def file(request: HttpRequest, pk: int) -> FileResponse:
    return FileResponse(BytesIO(b"one"))


@locked_view("order:{pk}")
async def astream(request: HttpRequest, pk: int) -> StreamingHttpResponse:
    async def parts() -> Any:
        yield b"one"
        yield b"two"

    return StreamingHttpResponse(parts())


def busy_inside(request: HttpRequest) -> HttpResponse:
    """Needs a lock that others may hold, and catches nothing."""
    with lock("inside", wait=0):
        return HttpResponse("done")


async def abusy_inside(request: HttpRequest) -> HttpResponse:
    async with lock("inside", wait=0):
        return HttpResponse("done")
