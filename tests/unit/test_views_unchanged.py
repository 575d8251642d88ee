"""A locked view differs from the same view without the lock in nothing but the lock: all ways to decorate it."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextvars import Context
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction
from django.contrib.auth.decorators import login_required
from django.contrib.auth.mixins import LoginRequiredMixin
from django.contrib.auth.models import AnonymousUser, User
from django.core.handlers.base import BaseHandler
from django.db import connections, transaction
from django.http import HttpResponse
from django.test import RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt

pytest.importorskip("rest_framework", reason="needs Django REST framework: pip install djangorestframework")

from rest_framework.decorators import api_view
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_redlock import lock, locked_view
from django_redlock.signals import lock_acquired, lock_released
from tests.shop.helpers import is_free

NAME = "view:order:7"
DATABASES = ["default", "warehouse"]
CLASSES = ["class", "api class", "viewset"]
PLACES = ["class", "dispatch", "method", "method_decorator", "subclass of a class", "URL of a class"]

pytestmark = [
    pytest.mark.usefixtures("shop"),
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]

Decorator = Callable[[Any], Any]


def own(view: Any) -> Any:
    """A decorator of the project, which can be put on anything that is called."""

    @wraps(view)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    return wrapper


def nothing(view: Any) -> Any:
    return view


MARKS: dict[str, Decorator] = {
    "nothing": nothing,
    "non_atomic": transaction.non_atomic_requests,
    "non_atomic(warehouse)": transaction.non_atomic_requests("warehouse"),
    "csrf_exempt": csrf_exempt,
    "never_cache": never_cache,
    "login_required": login_required,
}

LOCK = locked_view("order:{pk}")


class Runs(list[Any]):
    """One entry for each run of a view: whether each database is in a transaction, and how many are nested in it."""

    def note(self) -> None:
        events.append("ran")
        self.append([(connections[each].in_atomic_block, len(connections[each].savepoint_ids)) for each in DATABASES])


runs = Runs()
events: list[str] = []  # of one request


@pytest.fixture
def lock_events() -> Iterator[None]:
    """Have the events of locks noted, too."""

    def acquired(**about: Any) -> None:
        events.append("acquired")

    def released(**about: Any) -> None:
        open_ones = [each for each in DATABASES if connections[each].in_atomic_block]
        events.append(f"released inside transactions of {open_ones}" if open_ones else "released")

    lock_acquired.connect(acquired)
    lock_released.connect(released)
    yield
    lock_acquired.disconnect(acquired)
    lock_released.disconnect(released)


@dataclass(frozen=True)
class Way:
    """One way to decorate a view: where the lock is, and where another decorator is."""

    kind: str
    asynchronous: bool
    lock: str
    mark: str
    place: str

    def urls(self, locked: bool) -> list[Any]:
        """Return the callbacks of the URLs that lead to the view."""
        lock, mark = LOCK if locked else nothing, MARKS[self.mark]
        if self.kind in ("function", "api_view"):
            return self._of_function(lock, mark)
        return self._of_class(lock, mark)

    def _at(self, place: str, decorator: Decorator) -> Decorator:
        return decorator if self.place == place else nothing

    def _body(self, answer: Any, method: bool) -> Any:
        """Return a function, or a method, that notes its run."""
        if self.asynchronous:

            async def acall(request: Any, pk: int) -> Any:
                runs.note()
                return answer()

            async def amethod(self: Any, request: Any, pk: int) -> Any:
                runs.note()
                return answer()

            return amethod if method else acall

        def call(request: Any, pk: int) -> Any:
            runs.note()
            return answer()

        def in_class(self: Any, request: Any, pk: int) -> Any:
            runs.note()
            return answer()

        return in_class if method else call

    def _of_function(self, lock: Decorator, mark: Decorator) -> list[Any]:
        if self.kind == "api_view":
            decorate, body = api_view(["POST"]), self._body(Response, method=False)
            view = lock(self._at("below", mark)(decorate(body)))
            if self.lock == "below":
                view = decorate(lock(self._at("below", mark)(body)))
        else:
            view = lock(self._at("below", mark)(self._body(HttpResponse, method=False)))
        view = self._at("above", mark)(view)
        return [view, self._at("URL", mark)(view if self.asynchronous else own(view)), partial(view)]

    def _of_class(self, lock: Decorator, mark: Decorator) -> list[Any]:
        base, answer, actions, name = View, HttpResponse, (), "post"
        if self.kind != "class":
            base, answer = APIView, Response
        if self.kind == "viewset":
            base, actions, name = ViewSet, ({"post": "pay"},), "pay"

        def on_method(decorator: Decorator) -> Decorator:
            return nothing if decorator is nothing else method_decorator(decorator)

        def on_dispatch(decorator: Decorator) -> Decorator:
            return nothing if decorator is nothing else method_decorator(decorator, name="dispatch")

        method = self._body(answer, method=True)
        method.__name__ = name
        method = on_method(self._at("below on method", mark))(method)
        method = {"method": lock, "method_decorator": on_method(lock)}.get(self.lock, nothing)(method)
        method = on_method(self._at("above on method", mark))(method)
        made = type("Pay", (base,), {name: method, "__module__": __name__})
        made = on_dispatch(self._at("below", mark))(made)
        made = {"class": lock, "dispatch": on_dispatch(lock)}.get(self.lock, nothing)(made)
        if self.lock == "subclass of a class":
            made = lock(type("Locked", (made,), {"__module__": __name__}))
        made = on_dispatch(self._at("above", mark))(made)
        child = on_dispatch(self._at("subclass", mark))(type("Child", (made,), {"__module__": __name__}))
        mixed = type("Mixed", (LoginRequiredMixin, made), {"__module__": __name__})
        views = [each.as_view(*actions) for each in (made, child, mixed, made)]
        if self.lock == "URL of a class":
            views = [lock(view) for view in views]
        return [*views[:3], self._at("URL", mark)(views[3])]


def ways(kind: str, asynchronous: bool, place_of_lock: str) -> Iterator[Way]:
    places = ["above", "below", "URL"]
    if kind in CLASSES:
        places += ["above on method", "below on method", "subclass"]
    for mark in MARKS:
        for place in places[:1] if mark == "nothing" else places:
            # Django's dispatch() is no coroutine function, so this decorator takes its coroutine for a response.
            impossible = asynchronous and kind == "class" and mark == "never_cache" and "method" not in place
            if place == "URL" or not impossible:
                yield Way(kind, asynchronous, place_of_lock, mark, place)


def marks_of(view: Any) -> Any:
    """Return the marks that Django, the framework and other packages read of a view, but not the lock's own."""
    marks = {name: value for name, value in vars(view).items() if not name.startswith(("__", "_redlock"))}
    for name in ("view_class", "cls"):
        if name in marks:
            marks[name] = (marks[name].__name__, getattr(marks[name], "view_is_async", None))
    return marks | {"asynchronous": iscoroutinefunction(view), "name": getattr(view, "__name__", None)}


class Site:
    """The project's handler of requests over the URLs of a view, locked or not."""

    def __init__(self, way: Way, locked: bool, is_async: bool) -> None:
        self.views = views = way.urls(locked)
        self.allowed = ["", "acquired released", "acquired ran released"] if locked else ["", "ran"]
        self.is_async = is_async
        self.urlconf = tuple(path(f"{index}/<int:pk>/", view) for index, view in enumerate(views))
        self.handler = BaseHandler()
        self.handler.load_middleware(is_async=is_async)

    def ask(self, index: int, user: Any, method: str = "POST") -> tuple[int, list[Any]]:
        """Return the status of the response to a request, and what the bodies that ran have seen."""
        request = RequestFactory().generic(method, f"/{index}/7/")
        request.urlconf, request.user, request._dont_enforce_csrf_checks = self.urlconf, user, True
        runs.clear()
        events.clear()
        if self.is_async:
            ask = partial(asyncio.run, self.handler.get_response_async(request))
        else:
            ask = partial(self.handler.get_response, request)
        response = Context().run(ask)  # every resolver of URLs leaves a variable in the context, which slows asyncio
        assert " ".join(events) in self.allowed or (method == "GET" and events == ["ran"])
        return response.status_code, list(runs)

    def ask_all(self) -> list[Any]:
        """Ask every URL twice: a request may change what the next one finds."""
        seen: list[Any] = []
        for index in range(len(self.views)):
            seen.append((index, *self.ask(index, AnonymousUser())))
            seen.append((index, *self.ask(index, User(pk=1), "GET")))
        for index, view in enumerate(self.views):
            seen.append((index, *self.ask(index, User(pk=1))))
            seen.append((index, marks_of(view)))
        return seen


@pytest.mark.parametrize("atomic", [DATABASES, []], ids=["atomic", "not atomic"])
@pytest.mark.parametrize(
    ("kind", "asynchronous", "place_of_lock"),
    [
        ("function", False, "function"),
        ("function", True, "function"),
        ("api_view", False, "above"),
        ("api_view", False, "below"),
        *((kind, False, place) for kind in CLASSES for place in PLACES),
        *(("class", True, place) for place in PLACES),
    ],
)
def test_locked_view_differs_only_by_its_lock(
    settings, monkeypatch, lock_events, kind, asynchronous, place_of_lock, atomic
):
    """Status, transactions and marks are those of the same view without the lock, which is around all of them."""
    settings.MIDDLEWARE = []
    monkeypatch.setattr(logging.getLogger("django.request"), "disabled", True)  # it would mail the admins each error
    settings.REST_FRAMEWORK = {"DEFAULT_AUTHENTICATION_CLASSES": []}
    for alias in atomic:
        monkeypatch.setitem(connections.settings[alias], "ATOMIC_REQUESTS", True)
    for way in ways(kind, asynchronous, place_of_lock):
        plain, locked = Site(way, False, asynchronous), Site(way, True, asynchronous)

        expected = plain.ask_all()
        assert locked.ask_all() == expected, way

        assert is_free(NAME), way
        with lock(NAME):
            locked.allowed = [""]
            for index in range(len(locked.views)):
                status, seen = locked.ask(index, User(pk=1))
                ran = plain.ask(index, User(pk=1))[1]
                assert (status, seen) == (409 if ran else status, []), way
