"""
Run a view under a lock: one request at a time for each order, user, or whatever the key says.

The lock goes around the view's transaction. Under ``ATOMIC_REQUESTS`` Django would put the transaction around the
decorated view, and release the lock before the commit; so the decorator tells Django to leave the view alone, and
opens the same transactions itself, inside the lock.
"""

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from http import HTTPStatus
from typing import Any, TypeVar

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.conf import settings
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.utils.cache import patch_cache_control, patch_vary_headers
from django.utils.translation import gettext, ngettext

from .conf import DEFAULT_ALIAS
from .exceptions import LockTakenError, QuorumUnavailableError
from .handler import locks
from .locks import Lease, Lock, check_wait
from .querysets import in_transaction
from .view_keys import Call, Key, ViewKey

View = TypeVar("View", bound=Callable[..., Any])

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
TEMPLATE = "django_redlock/busy.html"
# The rest of the lease is the longest that the holder can go on; most requests are over long before.
LONGEST_RETRY_AFTER = 10  # seconds
NO_QUORUM_RETRY_AFTER = 5  # seconds

log = logging.getLogger("django_redlock")


def locked_view(
    key: Key,
    *,
    ttl: float | None = None,
    wait: float | None = 0,
    methods: Iterable[str] | None = None,
    using: str = DEFAULT_ALIAS,
) -> Callable[[View], View]:
    """
    Let only one request at a time into a view, for each value of *key*.

    A request that finds the lock taken is answered with 409 Conflict, one for which too few nodes answer with 503
    Service Unavailable, both with ``Retry-After``: an HTML page (``django_redlock/busy.html``), or problem details
    (RFC 9457) for clients that prefer JSON. Decorates functions and coroutine functions; for a class write
    ``@method_decorator(locked_view("order:{pk}"), name="dispatch")``.

    Under ``ATOMIC_REQUESTS`` the lock is released after the commit. A streaming response keeps it until it is closed.

    Args:
        key: What to lock, as the name ``view:<key>``. Either a template with the view's arguments and attributes of
            them, such as ``"order:{pk}"`` or ``"{request.user.pk}:{order_id}"``; or a short name: ``"user"``,
            ``"user_or_ip"``, ``"session"``, ``"ip"``, ``"path"``, ``"header:X"``, ``"get:x"``, ``"post:x"``,
            ``"kwarg:pk"``; or a callable that takes the view's arguments and returns a str; or a list of these, to
            be joined with ``:``.
        ttl: Length of the lease in seconds; None is ``OPTIONS["ttl"]``. It is renewed as the settings say.
        wait: How long a request tries, in seconds; 0 is one attempt. A waiting request occupies its worker.
        methods: The methods that are locked; None is all but GET, HEAD, OPTIONS and TRACE.
        using: Alias in ``REDLOCK``.

    Raises:
        ImproperlyConfigured: The key can never be resolved.
        TypeError: What is decorated is a class, or *methods* is a str.
        ValueError: *wait* is not a number of seconds.

    A request without a value for the key raises ``BadRequest`` (400) when the client left out a header or field, and
    ``ImproperlyConfigured`` otherwise: strangers never share a lock by accident. A view whose lease is lost raises
    ``LockLostError`` before it commits.
    """
    check_wait(wait)
    chosen = _check_methods(methods)

    def decorate(view: View) -> View:
        guard = _Guard(view, key, ttl, wait, chosen, using)
        locked: View = _guarded_async(guard) if guard.asynchronous else _guarded(guard)
        return locked

    return decorate


def _check_methods(methods: Iterable[str] | None) -> frozenset[str] | None:
    if methods is None:
        return None
    if isinstance(methods, str):
        raise TypeError(f"methods must be a list such as [{methods.upper()!r}], not the str {methods!r}.")
    chosen = frozenset(method.upper() for method in methods)
    if not chosen:
        raise ValueError("methods=[] locks no request; name at least one, or leave it out for all that change data.")
    return chosen | {"HEAD"} if "GET" in chosen else chosen  # Django answers HEAD with the view for GET


# The two flavours


def _guarded(guard: "_Guard") -> Any:
    view = guard.view

    @wraps(view)
    def locked(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if not guard.applies(request):
            with guard.transactions():
                return view(request, *args, **kwargs)
        lock = guard.lock(request, args, kwargs)
        try:
            lease = lock.acquire()
        except (LockTakenError, QuorumUnavailableError) as error:
            return refusal(request, error)
        try:
            with guard.transactions():
                response = guard.finished(view(request, *args, **kwargs))
                lease.ensure()
        except BaseException:
            lease.release()
            raise
        if keep_while_streaming(response, lease):
            return response
        guard.note(lease.release())
        return response

    locked._non_atomic_requests = guard.exempt  # type: ignore[attr-defined]
    return locked


def _guarded_async(guard: "_Guard") -> Any:
    view = guard.view

    @wraps(view)
    async def locked(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        guard.refuse_atomic_requests()
        if not guard.applies(request):
            return await view(request, *args, **kwargs)
        lock = await sync_to_async(guard.lock)(request, args, kwargs)  # may read the user or the session
        try:
            lease = await lock.aacquire()
        except (LockTakenError, QuorumUnavailableError) as error:
            return await sync_to_async(refusal)(request, error)
        try:
            response = await view(request, *args, **kwargs)
            lease.ensure()
        except BaseException:
            await lease.arelease()
            raise
        if keep_while_streaming(response, lease):
            return response
        guard.note(await lease.arelease())
        return response

    locked._non_atomic_requests = guard.exempt  # type: ignore[attr-defined]
    return locked


def keep_while_streaming(response: Any, lease: Lease) -> bool:
    """
    Let a streaming response release the lock when it is closed; returns whether it is one.

    Servers close every response, also when the client went away. One that is dropped instead, by a middleware that
    answers with another, takes the lease with it, which then ends with its ttl.
    """
    if not getattr(response, "streaming", False):
        return False
    response._resource_closers.append(lease.release)  # closed in any thread, so not arelease()
    return True


class _OwnTransactions(set[str]):
    """
    The databases for which a view wants no transaction; to Django, which asks with ``in``, all databases.

    So Django opens none around the lock, whatever ``DATABASES`` will say, and ``@transaction.non_atomic_requests``
    works below and above ``@locked_view``: it adds to this set.
    """

    def __contains__(self, alias: object) -> bool:
        return True


class _Guard:
    """One decorated view: its name, its key and its lock."""

    def __init__(
        self,
        view: Callable[..., Any],
        key: Key,
        ttl: float | None,
        wait: float | None,
        methods: frozenset[str] | None,
        using: str,
    ) -> None:
        if isinstance(view, type):
            raise TypeError(
                f"@locked_view decorates functions; for the class {view.__name__} write "
                '@method_decorator(locked_view(...), name="dispatch").'
            )
        self.view = view
        self.name, owner = _identify(view)
        self.asynchronous = iscoroutinefunction(view) or getattr(owner, "view_is_async", False)
        # A method bound by method_decorator is a partial that wraps the function with `self`.
        self._signature = inspect.signature(view, follow_wrapped=not isinstance(view, partial))
        self._key = ViewKey(self.name, key, self._signature)
        self._ttl, self._wait, self._methods, self._using = ttl, wait, methods, using
        self._below: set[str] = getattr(view, "_non_atomic_requests", set())
        self.exempt = self._exempt()

    def applies(self, request: HttpRequest) -> bool:
        """Return whether a request of this method is locked."""
        method = request.method or ""
        return method not in SAFE_METHODS if self._methods is None else method in self._methods

    def lock(self, request: HttpRequest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lock:
        """
        Return the lock of a request; asks no node.

        Raises:
            BadRequest: The client left out what the key needs.
            ImproperlyConfigured: The key has no value for another reason.
            RuntimeError: A transaction is open, so the lock would be released before the commit.
        """
        self._refuse_transactions()
        name = "view:" + self._key.resolve(Call(request, args, kwargs, self._arguments(request, args, kwargs)))
        label = f"{self.name} {request.method}"
        return locks[self._using].lock(name, ttl=self._ttl, wait=self._wait, kind="view", label=label)

    @contextmanager
    def transactions(self) -> Iterator[None]:
        """Open the transactions that Django would open around this view."""
        with ExitStack() as stack:
            for alias in self._atomic_aliases():
                stack.enter_context(transaction.atomic(using=alias))
            yield

    def refuse_atomic_requests(self) -> None:
        """Do what Django does to an async view; a decorated class may have hidden it from Django."""
        if self._atomic_aliases():
            raise RuntimeError(f"You cannot use ATOMIC_REQUESTS with async views, such as {self.name}.")

    def finished(self, response: Any) -> Any:
        """Return a response, and refuse the promise of one, which would be kept after the lock is released."""
        if inspect.isawaitable(response):
            if inspect.iscoroutine(response):
                response.close()
            raise TypeError(
                f"@locked_view on {self.name}: the view is asynchronous, but looks like a function that is not. Put "
                "@locked_view directly on the coroutine function."
            )
        return response

    def note(self, outcome: str) -> None:
        """Report a lock that was gone when the view, which has committed by now, released it."""
        if outcome in ("expired", "taken"):
            log.error(
                "the lock of view %s ended before the view did (%s); another request may have run beside it",
                self.name,
                outcome,
                extra={"event": "view_lock_lost", "view": self.name},
            )

    def _atomic_aliases(self) -> list[str]:
        return [
            alias
            for alias, database in connections.settings.items()
            if database["ATOMIC_REQUESTS"] and alias not in self._below and not set.__contains__(self.exempt, alias)
        ]

    def _exempt(self) -> set[str]:
        if isinstance(self._below, _OwnTransactions):  # a second @locked_view, which opens the transactions
            return self._below
        return set(self._below) if self.asynchronous else _OwnTransactions(self._below)

    def _refuse_transactions(self) -> None:
        for connection in connections.all(initialized_only=True):
            if in_transaction(connection):
                raise RuntimeError(
                    f"@locked_view on {self.name} is inside a transaction of database {connection.alias!r}, which "
                    "would commit after the lock is released. Under ATOMIC_REQUESTS decorate the whole view: a class "
                    'with @method_decorator(locked_view(...), name="dispatch"), and use functools.wraps() in your own '
                    "decorators. Otherwise move the transaction into the view."
                )

    def _arguments(self, request: HttpRequest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind_partial(request, *args, **kwargs)
        bound.apply_defaults()
        return bound.arguments | kwargs | {"request": request}


def _identify(view: Callable[..., Any]) -> tuple[str, type | None]:
    """Return a view's dotted name, and its class if it is a view class's function or method."""
    instance = getattr(getattr(view, "func", None), "__self__", None)  # bound by method_decorator
    owner = getattr(view, "view_class", None) if instance is None else type(instance)
    named = owner or view
    if named.__module__ == "django.utils.decorators":  # what method_decorator tries a decorator on
        return "a class", None
    return f"{named.__module__}.{getattr(named, '__qualname__', named)}", owner


# The answer to a request that did not get the lock


def refusal(request: HttpRequest, error: LockTakenError | QuorumUnavailableError) -> HttpResponse:
    """Return 409 or 503, as a page or as problem details; names no lock unless ``DEBUG`` is on."""
    if isinstance(error, LockTakenError):
        status, retry_after = HTTPStatus.CONFLICT, _retry_after(error.retry_after)
        title, detail = gettext("Already in progress"), gettext("The same request is being processed right now.")
        log.info("view lock taken: %s", error, extra={"event": "view_lock_taken", "lock": error.name})
    else:
        status, retry_after = HTTPStatus.SERVICE_UNAVAILABLE, NO_QUORUM_RETRY_AFTER
        title, detail = gettext("Temporarily unavailable"), gettext("The request cannot be processed right now.")
        log.error("view lock unavailable: %s", error, extra={"event": "view_lock_unavailable", "lock": error.name})
    again = ngettext("Try again in %(n)d second.", "Try again in %(n)d seconds.", retry_after) % {"n": retry_after}
    problem = {"title": title, "status": int(status), "detail": f"{detail} {again}"}
    if settings.DEBUG:
        problem["debug"] = str(error)
    response = _json(problem) if _prefers_json(request) else _page(request, problem)
    response.headers["Retry-After"] = str(retry_after)
    patch_vary_headers(response, ["Accept"])
    patch_cache_control(response, no_store=True)
    return response


def _retry_after(seconds: float | None) -> int:
    return max(1, min(LONGEST_RETRY_AFTER, math.ceil(seconds or 0)))


def _prefers_json(request: HttpRequest) -> bool:
    # The first stands for */* and for clients that say nothing.
    preferred = request.get_preferred_type(["text/html", "application/problem+json", "application/json"])
    return preferred is not None and preferred != "text/html"


def _json(problem: dict[str, Any]) -> HttpResponse:
    return JsonResponse(problem, status=problem["status"], content_type="application/problem+json")


def _page(request: HttpRequest, problem: dict[str, Any]) -> HttpResponse:
    try:
        content = render_to_string(TEMPLATE, problem, request)
    except TemplateDoesNotExist:  # a project without templates, or without our app
        return HttpResponse(problem["detail"], status=problem["status"], content_type="text/plain; charset=utf-8")
    return HttpResponse(content, status=problem["status"])
