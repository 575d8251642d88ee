"""
Run a view under a lock: one request at a time for each order, user, or other value of the key.

The lock goes around the view's transaction. Under ``ATOMIC_REQUESTS``, Django would open the transaction around the
decorated view, so that the lock would be released before the commit. The decorator therefore keeps Django from opening
a transaction, and opens the same transactions itself, inside the lock.
"""

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial, update_wrapper, wraps
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, register
from django.core.exceptions import BadRequest
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils.cache import patch_cache_control, patch_vary_headers
from django.utils.decorators import method_decorator
from django.utils.translation import gettext_lazy, ngettext

from .conf import DEFAULT_ALIAS
from .core.names import check_name
from .engine.lease import Lease, arelease_at_end, log_loss_with, note_late_loss, release_at_end, successor
from .engine.lock import Lock, decorators
from .engine.options import explained
from .exceptions import LockTakenError, QuorumUnavailableError, StaleTokenError, printable
from .handler import in_transaction, lock, locks
from .keys import P, ViewCall, ViewKey
from .routers import reads_pinned

if TYPE_CHECKING:  # it is long; so the reference shows its name
    from .keys import Key

log = logging.getLogger("django_redlock")

View = TypeVar("View", bound=Callable[..., Any])
Method = Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]
BusyStatus = Literal[409, 423, 429]
OnBusy = BusyStatus | Callable[[HttpRequest, LockTakenError], Any]
Refused = LockTakenError | QuorumUnavailableError | StaleTokenError

MISSING_KEY = "@locked_view needs a key in parentheses; write, for example, @locked_view('order:{pk}') or 'user_or_ip'."
MARGIN = 1 / 20  # share of the ttl that must be left for a commit, as in fenced()
KNOWN_METHODS = frozenset(get_args(Method))
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
SIMILAR = 0.75  # to a method's name; the names of WebDAV are less similar

TEMPLATE = "django_redlock/busy.html"
PROBLEM = "application/problem+json"
# The holder can continue for the rest of its lease at most; most requests finish long before.
LONGEST_RETRY_AFTER = 10  # seconds
NO_QUORUM_RETRY_AFTER = 5  # seconds
SAYINGS = {
    409: (gettext_lazy("Already in progress"), gettext_lazy("The same request is being processed right now.")),
    423: (gettext_lazy("Locked"), gettext_lazy("Somebody else is working on this right now.")),
    429: (gettext_lazy("One at a time"), gettext_lazy("Another request of yours is being processed right now.")),
    503: (gettext_lazy("Temporarily unavailable"), gettext_lazy("The request cannot be processed right now.")),
}


@explained
def locked_view(
    key: "Key[P]",
    *,
    ttl: float | None = None,
    wait: float | None = 0,
    methods: Iterable[Method] | None = None,
    on_busy: OnBusy = 409,
    using: str = DEFAULT_ALIAS,
) -> Callable[[View], View]:
    """
    Let only one request at a time into a view, for each value of *key*.

    A request that finds the lock taken gets 409 Conflict; a request for which too few nodes answer gets 503 Service
    Unavailable. Both responses have ``Retry-After``. They are an HTML page (``django_redlock/busy.html``), or problem
    details (RFC 9457) for clients that prefer JSON. The decorator works on functions, coroutine functions and view
    classes, and on one method of a view class, such as an action of a ViewSet, below ``@action``. A class of Django
    REST framework is locked after authentication and permissions.

    Under ``ATOMIC_REQUESTS``, the lock is released after the commit. A streaming response keeps the lock until the
    response is closed. With :class:`~django_redlock.routers.FencedRouter`, locked requests read where they write.

    Args:
        key: What to lock, as the name ``view:<key>``. Either a template with the view's arguments and attributes of
            them, such as ``"order:{pk}"`` or ``"{request.user.pk}:{order_id}"``; or a short name: ``"user"``,
            ``"user_or_ip"``, ``"session"``, ``"ip"``, ``"path"``, ``"header:X"``, ``"get:x"``, ``"post:x"``,
            ``"kwarg:pk"``; or a callable that takes the view's arguments and returns a str; or a list of these, to
            be joined with ``:``.
        ttl: Length of the lease in seconds; None means ``OPTIONS["ttl"]``. The lease is renewed as the settings say.
        wait: How long a request tries, in seconds; 0 means one attempt. A waiting request occupies its worker.
        methods: The methods that are locked; None means all but GET, HEAD, OPTIONS and TRACE.
        on_busy: The response when the lock is taken: the status 409, 423 (somebody is editing it) or 429 (one at a
            time), or a function that takes the request and the LockTakenError and returns a response.
        using: Alias in ``REDLOCK``.

    Raises:
        ImproperlyConfigured: The key can never be resolved.
        TypeError: The decorated class is not a view, *methods* is a str, or *on_busy* is neither status nor function.
        ValueError: *ttl* or *wait* is not a number of seconds, or *on_busy* is another status.

    A request without a value for the key raises ``BadRequest`` (400) when the client left out a header or field, and
    ``ImproperlyConfigured`` otherwise, so strangers never share a lock by accident. A view whose lease is lost raises
    ``LockLostError`` before it commits.
    """
    if isinstance(key, type):
        raise TypeError(MISSING_KEY)
    return Decorator(key, ttl, wait, check_methods(methods), check_on_busy(on_busy), using)


@dataclass(eq=False, slots=True)
class Options:
    """The checked options of :func:`~django_redlock.views.locked_view`."""

    key: "Key[...]"
    ttl: float | None
    wait: float | None
    methods: frozenset[str] | None
    on_busy: OnBusy
    using: str
    prefix: str = "view"
    """The first part of the lock's name."""
    example: Lock = field(init=False)
    """A lock with these options, for the system checks."""

    def __post_init__(self) -> None:
        name = f"{self.prefix}:{self.key}" if isinstance(self.key, str) and self.key else f"{self.prefix}:..."
        self.example = lock(name, ttl=self.ttl, wait=self.wait, using=self.using)
        decorators.add(self.example)


class Decorator(Options):
    """The result of :func:`locked_view`; as a class, so that the system checks find one that decorates nothing."""

    def __call__(self, view: Any) -> Any:
        """
        Return a view function or class that runs under its lock.

        Raises:
            TypeError: *view* is not a view, or the decorator has no key.
        """
        if isinstance(view, HttpRequest):  # `key` is the view, and this is the view's first request
            raise TypeError(MISSING_KEY)
        if not callable(view):
            raise TypeError(f"@locked_view decorates views, not {view!r}.")
        if inspect.isfunction(view) and next(iter(inspect.signature(view).parameters), "") == "self":
            return LockedMethod(view, self)
        if not isinstance(view, type):
            guard = Guard.of_view(view, self)
            return guard.around_async(view) if guard.asynchronous else guard.around(view)
        if hasattr(view, "perform_content_negotiation"):  # an APIView of Django REST framework
            return lock_api_view(view, self)
        if not hasattr(view, "dispatch"):
            raise TypeError(f"@locked_view decorates views; the class {view.__name__} has no dispatch().")
        own_method(view, "dispatch")
        return method_decorator(self, name="dispatch")(view)


class LockedMethod:
    """
    A method of a view class that ``@locked_view`` decorates, until its class is made.

    Django opens the transaction of a request around the whole class, so the lock has to go around that as well.

    Args:
        method: The decorated method.
        decorator: The decorator.
    """

    def __init__(self, method: Callable[..., Any], decorator: Decorator) -> None:
        update_wrapper(cast(Any, self), method)
        self._own = method, decorator, {*vars(self), "_own"}

    def __set_name__(self, owner: Any, name: str) -> None:
        method, decorator, own = self._own
        # Decorators above this one, such as @action, have left their notes on this object.
        method.__dict__.update({key: value for key, value in vars(self).items() if key not in own})
        setattr(owner, name, method)
        called = f"{owner.__module__}.{owner.__qualname__}.{name}"
        parameters = list(inspect.signature(method).parameters.values())
        ViewKey(called, decorator.key, inspect.Signature(parameters[1:]))  # raises if it can never be resolved
        if name.upper() in KNOWN_METHODS and decorator.methods is None:
            decorator = replace(decorator, methods=check_methods([name]))
        if hasattr(owner, "perform_content_negotiation"):
            lock_api_view(owner, decorator, only=name)
        elif hasattr(owner, "dispatch") and name.upper() in KNOWN_METHODS:
            own_method(owner, "dispatch")
            method_decorator(decorator, name="dispatch")(owner)
        elif hasattr(owner, "dispatch"):
            raise TypeError(f"@locked_view decorates views, and {called}() gets no request. Decorate the class.")
        else:
            raise TypeError(
                f"@locked_view on {called}(): {owner.__name__} is not a view class. Let it inherit from one, such as "
                "View or APIView, or decorate the view class that inherits from it."
            )


def own_method(view: Any, name: str) -> Any:
    """
    Return a method of a class, to be decorated; if the class inherits it, first give it one that calls ``super()``.

    The inherited function itself would leave out what comes between both classes where a view inherits from several,
    such as a class whose ``initial()`` checks permissions.
    """
    method = getattr(view, name)
    if name in vars(view):
        return method

    @wraps(method)
    def inherited(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(view, self), name)(request, *args, **kwargs)

    setattr(view, name, inherited)
    return inherited


def lock_api_view(view: Any, options: Options, *, only: str = "") -> Any:
    """
    Lock an APIView or a ViewSet, after authentication, permissions and throttles, and around the transaction.

    The framework looks up the handler after ``initial()`` has accepted the request; the lock is taken then.

    Args:
        view: The class.
        options: The checked options of :func:`locked_view`.
        only: The only action or method that is locked; empty means all.
    """
    dispatch, initial = own_method(view, "dispatch"), own_method(view, "initial")
    guard = Guard(
        f"{view.__module__}.{view.__qualname__}",
        inspect.signature(lambda request, *args, **kwargs: None),
        options,
        below=getattr(dispatch, "_non_atomic_requests", set()),
    )

    @wraps(dispatch)
    def locked_dispatch(self: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return dispatch(self, request, *args, **kwargs)

    @wraps(initial)
    def locked_initial(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        initial(self, request, *args, **kwargs)
        method = request.method.lower()
        if method in self.http_method_names and hasattr(self, method):
            chosen = not only or only == (getattr(self, "action", None) or method)
            around = guard.around_handler if chosen else guard.around_transaction
            setattr(self, method, around(getattr(self, method)))

    locked_dispatch._non_atomic_requests = guard.exempt  # type: ignore[attr-defined]
    view.dispatch, view.initial = locked_dispatch, locked_initial
    return view


def check_methods(methods: Iterable[str] | None) -> frozenset[str] | None:
    """
    Return the methods to lock, in upper case; None stays None and means all methods that change data.

    Raises:
        TypeError: *methods* is not a list of str.
        ValueError: *methods* is empty, or has a misspelt method.
    """
    if methods is None:
        return None
    if isinstance(methods, str):
        raise TypeError(f"methods must be a list such as [{methods.upper()!r}], not the str {methods!r}.")
    given = list(methods) if isinstance(methods, Iterable) else [methods]
    if not isinstance(methods, Iterable) or not all(isinstance(method, str) for method in given):
        raise TypeError(f"methods must be a list such as ['POST'], not {methods!r}.")
    chosen = frozenset(method.upper() for method in given)
    for method in sorted(chosen - KNOWN_METHODS):
        for close in get_close_matches(method, KNOWN_METHODS, 1, SIMILAR):
            raise ValueError(f"methods has {method!r}; did you mean {close!r}?")
    if not chosen:
        raise ValueError("methods=[] locks no request; name at least one, or leave it out for all that change data.")
    return chosen | {"HEAD"} if "GET" in chosen else chosen  # Django serves HEAD with the view for GET


def check_on_busy(on_busy: OnBusy) -> OnBusy:
    """
    Return *on_busy* if it is a valid status or function.

    Raises:
        TypeError: *on_busy* is neither a status nor a blocking function of two arguments.
        ValueError: *on_busy* is a status other than 409, 423 or 429.
    """
    if isinstance(on_busy, int):
        if on_busy not in get_args(BusyStatus):
            raise ValueError(f"on_busy must be 409, 423, 429 or a function, not {on_busy!r}.")
        return on_busy
    if iscoroutinefunction(on_busy) or not callable(on_busy):
        raise TypeError(f"on_busy must be a status or a function that is not a coroutine function, not {on_busy!r}.")
    try:
        inspect.signature(on_busy).bind(None, None)
    except TypeError:
        message = f"on_busy is called with the request and the error, which {on_busy!r} does not take."
        raise TypeError(message) from None
    except ValueError:
        pass  # a function in C may have no signature
    return on_busy


class OwnTransactions(set[str]):
    """
    The databases for which a view wants no transaction; ``in`` claims that it contains every database.

    Django tests with ``in``, so it opens no transaction around the lock, whatever ``DATABASES`` will say.
    ``@transaction.non_atomic_requests`` works below and above ``@locked_view``, because it adds to this set.
    """

    def __contains__(self, alias: object) -> bool:
        return True


class Guard:
    """
    One view under a lock: its name, key, lock and transactions.

    Args:
        name: The view's dotted name.
        signature: The view's signature, for the names of its arguments.
        options: The options of the decorator.
        below: The databases for which the view wants no transaction.
        asynchronous: Whether the view is a coroutine function.
    """

    def __init__(
        self,
        name: str,
        signature: inspect.Signature,
        options: Options,
        *,
        below: set[str],
        asynchronous: bool = False,
    ) -> None:
        self.name = name
        self.asynchronous = asynchronous
        self._options = options
        self._signature = signature
        self._key = ViewKey(name, options.key, signature)
        self._below = below
        if isinstance(below, OwnTransactions):  # an inner @locked_view opens the transactions
            self.exempt: set[str] = below
        else:
            self.exempt = set(below) if asynchronous else OwnTransactions(below)

    @classmethod
    def of_view(cls, view: Callable[..., Any], options: Options) -> "Guard":
        """Return the guard of a function, or of a method that ``method_decorator`` has bound."""
        instance = getattr(getattr(view, "func", None), "__self__", None)  # set if method_decorator bound it
        owner = getattr(view, "view_class", None) if instance is None else type(instance)
        named = owner or view
        name = f"{named.__module__}.{getattr(named, '__qualname__', named)}"
        if named.__module__ == "django.utils.decorators":  # method_decorator tries a decorator on a dummy
            name, owner = "a class", None
        # A method bound by method_decorator is a partial that wraps the function with `self`.
        return cls(
            name,
            inspect.signature(view, follow_wrapped=not isinstance(view, partial)),
            options,
            below=getattr(view, "_non_atomic_requests", set()),
            asynchronous=iscoroutinefunction(view) or getattr(owner, "view_is_async", False),
        )

    def around(self, view: Callable[..., Any]) -> Any:
        """Return a blocking view that runs under its lock."""

        @wraps(view)
        def locked(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            if not self.applies(request):
                with self._transactions():
                    return view(request, *args, **kwargs)
            lock = self._lock(request, args, kwargs)
            held = self._held(request)
            if outer := held.get(lock.name):
                with self._transactions():
                    response = view(request, *args, **kwargs)
                    self._refuse_awaitable(response)
                    self.ensure(outer)
                return response
            try:
                lease = lock.acquire()
            except (LockTakenError, QuorumUnavailableError) as error:
                return self._refuse(request, error)
            log_loss_with(lease, self._log_loss)
            held[lock.name] = lease
            try:
                # The request before this one may have changed the row that the key stands for, so that row is read
                # where it is written.
                with reads_pinned(connections), self._transactions():
                    response = view(request, *args, **kwargs)
                    self._refuse_awaitable(response)
                    self.ensure(lease)
            except BaseException:
                release_and_note(lease)
                raise
            finally:
                del held[lock.name]
            if not self._keep_while_streaming(response, lease):
                release_and_note(lease)
            return response

        locked._non_atomic_requests = self.exempt  # type: ignore[attr-defined]
        return locked

    def around_async(self, view: Callable[..., Any]) -> Any:
        """Return an asynchronous view that runs under its lock."""

        @wraps(view)
        async def locked(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            applies = self.applies(request)
            if self._atomic_aliases():  # a decorated class may have hidden the view from Django's own check
                raise RuntimeError(f"You cannot use ATOMIC_REQUESTS with async views, such as {self.name}.")
            if not applies:
                return await view(request, *args, **kwargs)
            lock = await sync_to_async(self._lock)(request, args, kwargs)  # the key may read the user or the session
            held = self._held(request)
            if outer := held.get(lock.name):
                response = await view(request, *args, **kwargs)
                self.ensure(outer)
                return response
            try:
                lease = await lock.aacquire()
            except (LockTakenError, QuorumUnavailableError) as error:
                return await sync_to_async(self._refuse)(request, error)
            log_loss_with(lease, self._log_loss)
            held[lock.name] = lease
            try:
                with reads_pinned(connections):
                    response = await view(request, *args, **kwargs)
                self.ensure(lease)
            except BaseException:
                note_late_loss(lease, await arelease_at_end(lease))
                raise
            finally:
                del held[lock.name]
            if not self._keep_while_streaming(response, lease):
                note_late_loss(lease, await arelease_at_end(lease))
            return response

        locked._non_atomic_requests = self.exempt  # type: ignore[attr-defined]
        return locked

    def around_handler(self, handler: Any) -> Any:
        """Return a handler of a view of Django REST framework that runs under its lock."""
        from rest_framework.exceptions import ParseError  # only here: Django REST framework is optional

        locked = self.around(handler)

        @wraps(handler)
        def handle(request: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return locked(request, *args, **kwargs)
            except BadRequest as error:  # the framework does not know BadRequest
                raise ParseError(str(error.__cause__ or error)) from error

        return handle

    def around_transaction(self, handler: Any) -> Any:
        """Return a handler without a lock that runs in the transactions that Django would open around it."""

        @wraps(handler)
        def handle(*args: Any, **kwargs: Any) -> Any:
            with self._transactions():
                return handler(*args, **kwargs)

        return handle

    def applies(self, request: HttpRequest) -> bool:
        """
        Return whether requests with this request's method are locked.

        Raises:
            TypeError: The view's first argument is not a request.
        """
        if not hasattr(request, "META"):
            raise TypeError(
                f"@locked_view on {self.name} got a {type(request).__name__} instead of a request. Decorate the class, "
                "with methods=[...] if needed, or write @method_decorator(locked_view(...)) above the method."
            )
        methods = self._options.methods
        return request.method not in SAFE_METHODS if methods is None else request.method in methods

    def ensure(self, lease: Lease) -> None:
        """
        Make sure before the commit that the lock is still held, and long enough for the commit.

        Raises:
            LockLostError: The lock is lost, or too little time is left.
        """
        lease.ensure(lease.ttl * MARGIN if self._atomic_aliases() else 0.0)

    def _lock(self, request: HttpRequest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lock:
        """
        Return the lock of a request, without a network call.

        Raises:
            BadRequest: The client left out a value that the key needs, or sent one that no lock's name can have.
            ImproperlyConfigured: The key has no value for another reason.
            RuntimeError: A transaction is open, so the lock would be released before the commit.
        """
        for connection in connections.all(initialized_only=True):
            if in_transaction(connection):
                raise RuntimeError(
                    f"@locked_view on {self.name} is inside a transaction of database {connection.alias!r}, which "
                    "would commit after the lock is released. Under ATOMIC_REQUESTS decorate the class itself, or "
                    "put @locked_view directly on its method, without method_decorator; above @api_view on a function; "
                    "and use functools.wraps() in your own decorators. Otherwise move the transaction into the view."
                )
        bound = self._signature.bind_partial(request, *args, **kwargs)
        bound.apply_defaults()
        call = ViewCall(request, (request, *args), kwargs, bound.arguments | kwargs | {"request": request})
        label = f"{self.name} {request.method}"
        try:
            name = check_name(f"{self._options.prefix}:{self._key.resolve(call)}")
        except ValueError as error:  # only a value of the request can be too long, or not be valid Unicode
            raise BadRequest(f"@locked_view on {self.name}: {error}") from error
        options = self._options
        return locks[options.using].on_behalf(name, ttl=options.ttl, wait=options.wait, kind="view", label=label)

    def _held(self, request: Any) -> dict[str, Lease]:
        """
        Return the leases, by name, under which this request already runs: it must not be refused by its own lock.

        A subclass may be decorated as its base class is, and a view may call another one with its request.
        """
        inner = getattr(request, "_request", request)  # the former: that of Django REST framework wraps Django's
        leases: dict[str, dict[str, Lease]] = vars(inner).setdefault("_redlock_leases", {})
        return leases.setdefault(self._options.using, {})

    def _refuse(self, request: HttpRequest, error: LockTakenError | QuorumUnavailableError) -> Any:
        """Return the answer to a request that did not get the lock."""
        on_busy = self._options.on_busy
        if isinstance(on_busy, int):
            return response_to(request, error, status=on_busy)
        return on_busy(request, error) if isinstance(error, LockTakenError) else response_to(request, error)

    def _refuse_awaitable(self, response: Any) -> None:
        """Refuse an awaitable as a response: it would only run after the lock is released."""
        if inspect.isawaitable(response):
            if inspect.iscoroutine(response):
                response.close()
            raise TypeError(
                f"@locked_view on {self.name}: the view is asynchronous, but looks like a synchronous function. Put "
                "@locked_view directly on the coroutine function."
            )

    def _keep_while_streaming(self, response: Any, lease: Lease) -> bool:
        """
        Let a streaming response release the lock when it is closed; return whether the response is streaming.

        Servers close every response, even if the client has gone away. If a middleware drops the response and returns
        another, nothing releases the lock: the lease is dropped as well and ends with its ttl.
        """
        if not getattr(response, "streaming", False):
            return False
        response._resource_closers.append(partial(release_and_note, lease))  # any thread may close it, so not async
        return True

    def _log_loss(self, lease: Lease) -> None:
        log.error(
            "the lock of view %s ended before the view did: %s (%s); another request may have run beside it%s",
            self.name,
            printable(lease.name),
            lease.reason,
            successor(lease),
            extra={"event": "view_lock_lost", "lock": lease.name, "view": self.name},
        )

    @contextmanager
    def _transactions(self) -> Iterator[None]:
        """Open the transactions that Django would open around this view."""
        with ExitStack() as stack:
            for alias in self._atomic_aliases():
                stack.enter_context(transaction.atomic(using=alias))
            yield

    def _atomic_aliases(self) -> list[str]:
        return [
            alias
            for alias, database in connections.settings.items()
            if database["ATOMIC_REQUESTS"] and alias not in self._below and not set.__contains__(self.exempt, alias)
        ]


def release_and_note(lease: Lease) -> None:
    """Release the lock of a view; log its loss if only the release shows it, because the view may have committed."""
    note_late_loss(lease, release_at_end(lease))


def response_to(request: HttpRequest, error: Refused, *, status: int = HTTPStatus.CONFLICT) -> HttpResponse:
    """
    Return the response to a request that did not get its lock: a page for people, problem details for programs.

    The response names the lock only if ``DEBUG`` is on. It has a ``Retry-After`` header and must not be cached.

    Args:
        request: The request; clients that prefer JSON, and those of Django REST framework, get problem details.
        error: What went wrong. :class:`QuorumUnavailableError` is always answered with 503.
        status: The status of the response if another holder has the lock: 409, 423 or 429.
    """
    problem, retry_after = problem_of(error, status)
    # The first type serves */* and clients that state no preference.
    preferred = request.get_preferred_type(["text/html", PROBLEM, "application/json"])
    response: HttpResponse
    if hasattr(request, "accepted_renderer") or preferred not in (None, "text/html"):  # the former: REST framework
        response = JsonResponse(problem, status=problem["status"], content_type=PROBLEM)
    else:
        try:
            response = HttpResponse(render_to_string(TEMPLATE, problem, request), status=problem["status"])
        except TemplateDoesNotExist:  # a project without templates, or without our app
            plain = "text/plain; charset=utf-8"
            response = HttpResponse(problem["detail"], status=problem["status"], content_type=plain)
    response.headers["Retry-After"] = str(retry_after)
    patch_vary_headers(response, ["Accept"])
    patch_cache_control(response, no_store=True)
    return response


def problem_of(error: Refused, status: int = HTTPStatus.CONFLICT) -> tuple[dict[str, Any], int]:
    """Return problem details and the number of seconds before a retry; write the error to the log."""
    if isinstance(error, QuorumUnavailableError):
        status, retry_after = HTTPStatus.SERVICE_UNAVAILABLE, NO_QUORUM_RETRY_AFTER
        log.error("view lock unavailable: %s", error, extra={"event": "view_lock_unavailable", "lock": error.name})
    else:
        left = math.ceil(getattr(error, "retry_after", None) or 0)
        retry_after = max(1, min(LONGEST_RETRY_AFTER, left))
        log.info("view lock taken: %s", error, extra={"event": "view_lock_taken", "lock": error.name})
    title, detail = SAYINGS[status]
    again = ngettext("Try again in %(n)d second.", "Try again in %(n)d seconds.", retry_after) % {"n": retry_after}
    problem = {"title": str(title), "status": int(status), "detail": f"{detail} {again}"}
    if settings.DEBUG:
        problem["debug"] = str(error)
    return problem, retry_after


@register(Tags.urls)
def check_views(**kwargs: Any) -> list[CheckMessage]:
    """Report the views whose decorator has no key, or is inside the transaction that Django opens around them."""
    if not getattr(settings, "ROOT_URLCONF", None):
        return []
    atomic = any(entry["ATOMIC_REQUESTS"] for entry in connections.settings.values())
    messages: dict[str, CheckMessage] = {}
    for pattern in _patterns(get_resolver()):
        if isinstance(pattern.callback, Decorator):
            text = (
                f"The view of the URL pattern {str(pattern.pattern)!r} is not locked, and fails at its first request."
            )
            messages[text] = Error(text, hint=MISSING_KEY, id="redlock.E012")
        view: Any = getattr(pattern.callback, "view_class", None) or getattr(pattern.callback, "cls", None)
        for name in _inside(view) if atomic and view else ():
            text = (
                f"@method_decorator puts @locked_view on {view.__module__}.{view.__qualname__}.{name}() inside the "
                "transaction of ATOMIC_REQUESTS: each request that it would lock fails."
            )
            hint = "Put @locked_view directly on the method, below @action, or on the class."
            messages[text] = Error(text, hint=hint, id="redlock.E013")
    return list(messages.values())


def _inside(view: Any) -> Iterator[str]:
    """Yield the methods of a view class that only ``method_decorator`` locks, whose notes it copies to the method."""
    if isinstance(getattr(view.dispatch, "_non_atomic_requests", None), OwnTransactions):
        return
    for name in dir(view):
        if isinstance(getattr(getattr(view, name, None), "_non_atomic_requests", None), OwnTransactions):
            yield name


def _patterns(resolver: URLResolver) -> Iterator[URLPattern]:
    for pattern in resolver.url_patterns:
        if isinstance(pattern, URLResolver):
            yield from _patterns(pattern)
        else:
            yield pattern
