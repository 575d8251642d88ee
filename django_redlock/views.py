"""
Run a view under a lock: one request at a time for each order, user, or other value of the key.

The lock goes around the view's transaction, so that it is released after the commit, see
:mod:`~django_redlock.db.requests`.
"""

import inspect
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial, update_wrapper, wraps
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import BadRequest
from django.db import connections
from django.http import FileResponse, HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils.cache import patch_cache_control, patch_vary_headers
from django.utils.translation import gettext_lazy, ngettext

from .core.names import check_name, is_text
from .core.rules import DEFAULT_ALIAS
from .db.requests import (
    HANDLERS,
    RequestLock,
    actions_of,
    chain,
    class_of,
    dispatches,
    handler_of,
    handles,
    locks_before,
    locks_later,
    locks_of,
    locks_taken,
    locks_within,
    mark,
    methods_of,
    own_request,
    reached,
    transactions,
)
from .db.threads import end_of_thread_work
from .engine.functions import makes_coroutine, makes_generator, work_left
from .engine.lease import (
    Lease,
    arelease_at_end,
    entered_again,
    log_loss_with,
    note_late_loss,
    outlive_loop,
    release_at_end,
    release_when_dropped,
    successor,
)
from .engine.lock import Lock, decorators
from .engine.manager import owner_here
from .engine.options import explained
from .exceptions import LockTakenError, QuorumUnavailableError, StaleTokenError, printable
from .frameworks import framework_of
from .handler import in_transaction, lock, locks
from .keys.view import P, ViewCall, ViewKey, arguments_of
from .routers import reads_pinned

if TYPE_CHECKING:  # it is long; so the reference shows its name
    from .keys.view import Key

log = logging.getLogger("django_redlock")

View = TypeVar("View", bound=Callable[..., Any])
Method = Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]
BusyStatus = Literal[409, 423, 429]
OnBusy = BusyStatus | Callable[[HttpRequest, LockTakenError], Any]
Refused = LockTakenError | QuorumUnavailableError | StaleTokenError

MISSING_KEY = "@locked_view needs a key in parentheses; write, for example, @locked_view('order:{pk}') or 'user_or_ip'."
MARGIN = 1 / 20  # share of each ttl that must be left for a commit, as in fenced()
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

    Under ``ATOMIC_REQUESTS``, the lock is released after the commit. A streaming response keeps the lock until its
    iterator ends or raises, or the response is closed. With :class:`~django_redlock.routers.FencedRouter`, locked
    requests read where they write.

    Args:
        key: What to lock, as the name ``view:<key>``. Either a template with the view's arguments and attributes of
            them, such as ``"order:{pk}"`` or ``"{request.user.pk}:{order_id}"``; or a short name: ``"user"``,
            ``"user_or_ip"``, ``"session"``, ``"ip"``, ``"path"``, ``"header:X"``, ``"get:x"``, ``"post:x"``,
            ``"kwarg:pk"``; or a callable that takes the view's arguments and returns a str; or a list of these, to
            be joined with ``:``.
        ttl: Length of the lease in seconds; None means ``OPTIONS["ttl"]``. The lease is renewed as the settings say.
        wait: How long a request tries, in seconds; 0 means one attempt. A waiting request occupies its worker.
        methods: The methods that are locked; None means all but GET, HEAD, OPTIONS and TRACE, and on one method of a
            class all that it handles.
        on_busy: The response when the lock is taken: the status 409, 423 (somebody is editing it) or 429 (one at a
            time), or a function that takes the request and the LockTakenError and returns a response.
        using: Alias in ``REDLOCK``.

    Raises:
        ImproperlyConfigured: The key can never be resolved.
        TypeError: The decorated class is not a view, the decorated method handles no request, *methods* is a str, or
            *on_busy* is neither status nor function.
        ValueError: *ttl* or *wait* is not a number of seconds, *methods* leaves out the decorated method, or *on_busy*
            is another status.

    A request without a value for the key raises ``BadRequest`` (400) when the client left out a header or field, and
    ``ImproperlyConfigured`` otherwise, so strangers never share a lock by accident. A view whose lease is lost raises
    ``LockLostError`` before it commits.
    """
    if isinstance(key, type):
        raise TypeError(MISSING_KEY)
    return LockedView(key, ttl, wait, check_methods(methods), check_on_busy(on_busy), using)


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
    safe: bool = False
    """Whether *methods* None means all, also GET, HEAD, OPTIONS and TRACE."""
    only: set[str] = field(default_factory=set)
    """The methods of a view class that are decorated; empty if the class is, or a function."""
    example: Lock = field(init=False)
    """A lock with these options, for the system checks."""

    def __post_init__(self) -> None:
        name = f"{self.prefix}:{self.key}" if isinstance(self.key, str) and self.key else f"{self.prefix}:..."
        self.example = lock(name, ttl=self.ttl, wait=self.wait, using=self.using)
        decorators.add(self.example)

    def takes(self, method: str | None, handlers: Collection[str]) -> bool:
        """Return whether a request takes the lock, if these methods of its view class handle it."""
        if self.only and self.only.isdisjoint(handlers):
            return False
        if self.methods is None:
            return self.safe or method not in SAFE_METHODS
        return method in self.methods


class LockedView(Options):
    """The result of :func:`locked_view`; as a class, so that the system checks find one that decorates nothing."""

    def __call__(self, view: Any) -> Any:
        """
        Return a view function or class that runs under its lock.

        Raises:
            TypeError: *view* is not a view, or the decorator has no key.
        """
        if hasattr(view, "META"):  # `key` is the view, and this is the view's first request
            raise TypeError(MISSING_KEY)
        if not callable(view):
            raise TypeError(f"@locked_view decorates views, not {view!r}.")
        if isinstance(view, LockedMethod):
            return LockedMethod(view, self)
        first = next(iter(inspect.signature(view).parameters), "") if inspect.isfunction(view) else ""
        if first == "self" and class_of(view) is None:  # a ViewSet's view has the signature of its dispatch()
            return LockedMethod(view, self)
        if not isinstance(view, type):
            return Guard.of_view(view, self).around(view)
        if not hasattr(view, "dispatch"):
            raise TypeError(f"@locked_view decorates views; the class {view.__name__} has no dispatch().")
        signature = inspect.signature(lambda request, *args, **kwargs: None)
        lock_class(view, Guard(f"{view.__module__}.{view.__qualname__}", signature, self, view))
        return view

    def __getattr__(self, name: str) -> Any:
        """Fail as for any attribute, but with the usual reason why a decorator asks for one, such as ``__name__``."""
        raise AttributeError(f"A decorator has no {name}. {MISSING_KEY}", name=name, obj=self)


class LockedMethod:
    """
    A method of a view class under its lock, until its class is made, which then gets a function.

    The function takes the lock, however it is called. Beyond that, the class takes the lock before all that it does for
    a request that the method handles, or that is handled by a method that overrides this one: the lock then encloses
    more of the request's transaction. A decorator above this one may hide this object from its class, such as
    ``method_decorator``; then the function alone takes the lock.

    Args:
        method: The decorated method.
        decorator: The decorator.
    """

    # Not in __dict__, which decorators copy.
    __slots__ = ("__dict__", "_function", "_guards")

    def __init__(self, method: Any, decorator: LockedView) -> None:
        name = method.__name__.upper()
        if decorator.methods is None:
            decorator = replace(decorator, safe=True, only=set())
        elif name in KNOWN_METHODS and name not in decorator.methods:
            raise ValueError(
                f"methods={sorted(decorator.methods)} leaves out {name}, so {method.__name__}() is not locked."
            )
        else:
            decorator = replace(decorator, only=set())
        guard = Guard.of_method(method, decorator)
        self._guards: tuple[Guard, ...] = (guard, *(method._guards if isinstance(method, LockedMethod) else ()))
        self._function = guard.around_method(method)
        update_wrapper(cast(Any, self), self._function)
        if iscoroutinefunction(self._function):
            markcoroutinefunction(cast(Any, self))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self._function.__get__(instance, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, as a decorator above this one does."""
        return self._function(*args, **kwargs)

    def __set_name__(self, owner: Any, name: str) -> None:
        # Decorators above this one, such as @action, have left their notes on this object.
        notes = {key: value for key, value in vars(self).items() if not key.startswith("__")}
        self._function.__dict__.update(notes)
        setattr(owner, name, self._function)
        check_handler(owner, name, f"{owner.__module__}.{owner.__qualname__}.{name}")
        for guard in reversed(self._guards):
            guard.options.only.add(name)
            if guard.options not in locks_of(vars(owner).get("dispatch")):
                lock_class(owner, guard)


def check_handler(owner: Any, name: str, called: str) -> None:
    """
    Refuse a decorated method that handles no request: its class would never take the lock for a request.

    Raises:
        TypeError: The method handles no request, or its class is not a view class.
    """
    if not hasattr(owner, "dispatch"):
        raise TypeError(
            f"@locked_view on {called}(): {owner.__name__} is not a view class. Let it inherit from one, such as "
            "View or APIView, or decorate the view class that inherits from it."
        )
    if name in HANDLERS | methods_of(owner):
        return
    framework = framework_of(owner)
    if not framework.may_handle(owner, name):
        raise TypeError(
            f"@locked_view decorates views, and {called}() handles no request. Decorate the class, or a method that "
            f"does, such as {framework.handlers}."
        )


def own_dispatch(view: Any) -> Any:
    """
    Return ``dispatch()`` of a class, to be decorated; if the class inherits it, one that calls ``super()``.

    The inherited function itself would leave out what comes between both classes where a view inherits from several,
    such as a class whose ``dispatch()`` checks permissions.
    """
    dispatch = view.dispatch
    if "dispatch" in vars(view):
        return dispatch

    @wraps(dispatch)
    def inherited(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        return super(view, self).dispatch(request, *args, **kwargs)

    return inherited


def lock_class(view: Any, guard: "Guard") -> None:
    """
    Lock a view class around ``dispatch()``; if that authenticates the request, around the method that handles it.
    """
    dispatch = own_dispatch(view)
    framework = framework_of(view)

    @wraps(dispatch)
    def locked_dispatch(self: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        inner = partial(dispatch, self)
        handler = handler_of(type(self), framework.actions(self), request.method)
        if not guard.options.takes(request.method, reached(type(self), handler)):
            return inner(request, *args, **kwargs)
        if not framework.authenticates:
            return (guard.arun if self.view_is_async else guard.run)(inner, request, args, kwargs)
        method = (request.method or "").lower()
        if hasattr(self, method):
            setattr(self, method, guard.around(getattr(self, method)))
        return inner(request, *args, **kwargs)

    # Around the method that handles the request, the lock of the class that is decorated last is the innermost.
    locks = locks_of(dispatch)
    mark(locked_dispatch, (*locks, guard.options) if framework.authenticates else (guard.options, *locks))
    view.dispatch = locked_dispatch


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
    listed = isinstance(methods, Iterable) and not is_text(methods)
    given = list(methods) if listed else []
    if not listed or not all(isinstance(method, str) for method in given):
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
    if not callable(on_busy) or makes_coroutine(on_busy) or makes_generator(on_busy):
        raise TypeError(f"on_busy must be a status or a function that is not a coroutine function, not {on_busy!r}.")
    try:
        inspect.signature(on_busy).bind(None, None)
    except TypeError:
        message = f"on_busy is called with the request and the error, which {on_busy!r} does not take."
        raise TypeError(message) from None
    except ValueError:
        pass  # a function in C may have no signature
    return on_busy


class Guard:
    """
    One view under a lock: its name, key and lock.

    Args:
        name: The view's dotted name.
        signature: The view's signature, for the names of its arguments.
        options: The options of the decorator.
        owner: The view's class, if it has one.
    """

    def __init__(self, name: str, signature: inspect.Signature, options: Options, owner: Any = None) -> None:
        self.name = name
        self.options = options
        self._signature = signature
        self._key = ViewKey(name, options.key, signature)
        self._programs = framework_of(owner).programs

    @classmethod
    def of_view(cls, view: Callable[..., Any], options: Options) -> "Guard":
        """Return the guard of a function, or of a method that ``method_decorator`` has bound."""
        instance = getattr(getattr(view, "func", None), "__self__", None)  # set if method_decorator bound it
        owner = class_of(view) if instance is None else type(instance)
        named = owner or view
        name = f"{named.__module__}.{getattr(named, '__qualname__', named)}"
        if named.__module__ == "django.utils.decorators":  # method_decorator tries a decorator on a dummy
            name, owner = "a class", None
        # What method_decorator has bound, and the view of a ViewSet, name a method that they wrap, with its `self`.
        follow = not isinstance(view, partial) and class_of(view) is None
        return cls(name, inspect.signature(view, follow_wrapped=follow), options, owner)

    @classmethod
    def of_method(cls, method: Callable[..., Any], options: Options) -> "Guard":
        """Return the guard of a method of a view class, which may not be made yet."""
        parameters = list(inspect.signature(method).parameters.values())[1:]
        return cls(f"{method.__module__}.{method.__qualname__}", inspect.Signature(parameters), options)

    def around(self, view: Callable[..., Any]) -> Any:
        """Return a view that runs under its lock."""
        owner = class_of(view) or type(getattr(getattr(view, "func", None), "__self__", None))
        locked: Any
        if iscoroutinefunction(view) or getattr(owner, "view_is_async", False):

            @wraps(view)
            async def locked(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                return await self.arun(view, request, args, kwargs)
        else:

            @wraps(view)
            def locked(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                return self.run(view, request, args, kwargs)

        mark(locked, (self.options, *locks_of(view)))
        return locked

    def around_method(self, method: Callable[..., Any]) -> Any:
        """Return a method of a view class that runs under its lock."""
        locked: Any
        if iscoroutinefunction(method):

            @wraps(method)
            async def locked(view: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                return await self.arun(partial(method, view), request, args, kwargs)
        else:

            @wraps(method)
            def locked(view: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                return self.run(partial(method, view), request, args, kwargs)

        mark(locked, (self.options, *locks_of(method)))
        return locked

    def run(self, view: Callable[..., Any], request: HttpRequest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a blocking view under its lock, or return the response that refuses the request."""
        if not self.applies(request):
            return view(request, *args, **kwargs)
        lock, users = self._lock(request, args, kwargs)
        if users:
            lease = entered_again(users[-1])
        else:
            try:
                lease = lock.acquire()
            except (LockTakenError, QuorumUnavailableError) as error:
                return self._refuse(request, error)
            log_loss_with(lease, self._log_loss)
        try:
            # The request before this one may have changed the row that the key stands for, so that row is read where
            # it is written.
            with noted(lease, users), reads_pinned(connections), transactions(request, self.options) as atomic:
                response = view(request, *args, **kwargs)
                self._refuse_work_left(response)
                if atomic:
                    ensure_all(request)
                self.ensure(lease)
        except BaseException:
            release_and_note(lease)
            raise
        if not keep_while_streaming(response, lease):
            release_and_note(lease)
        return response

    async def arun(
        self, view: Callable[..., Any], request: HttpRequest, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an asynchronous view under its lock; Django refuses transactions around it."""
        if not self.applies(request):
            return await view(request, *args, **kwargs)
        lock, users = await sync_to_async(self._lock)(request, args, kwargs)  # the key may read the user or the session
        if users:
            lease = entered_again(users[-1])
        else:
            try:
                lease = await lock.aacquire()
            except (LockTakenError, QuorumUnavailableError) as error:
                return await sync_to_async(self._refuse)(request, error)
            log_loss_with(lease, self._log_loss)
        try:
            with noted(lease, users), reads_pinned(connections):
                try:
                    response = await view(request, *args, **kwargs)
                    self._refuse_work_left(response)
                    self.ensure(lease)
                except BaseException:
                    await end_of_thread_work()  # which may call a view under the same lease
                    raise
        except BaseException:
            note_late_loss(lease, await arelease_at_end(lease))
            raise
        if keep_while_streaming(response, lease):
            outlive_loop(lease)  # under WSGI, the response is read after the end of the loop
        else:
            note_late_loss(lease, await arelease_at_end(lease))
        return response

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
        return self.options.takes(request.method, self.options.only)

    def ensure(self, lease: Lease) -> None:
        """
        Make sure that the lock is still held at the end of the view.

        Raises:
            LockLostError: The lock is lost.
        """
        lease.ensure()

    def _lock(self, request: HttpRequest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Lock, list[Lease]]:
        """
        Return the lock of a request, and its lease for each view that runs under it already; make no network call.

        Raises:
            BadRequest: The client left out a value that the key needs, or sent one that no lock's name can have.
            ImproperlyConfigured: The key has no value for another reason.
            Exception: The framework's own error in place of BadRequest.
            RuntimeError: A transaction is open, so the lock would be released before the commit.
        """
        bound = self._signature.bind_partial(request, *args, **kwargs)
        bound.apply_defaults()
        call = ViewCall(request, (request, *args), kwargs, bound.arguments | kwargs | {"request": request})
        label = f"{self.name} {request.method}"
        framework = framework_of(type(request))
        try:
            key = self._key.resolve(call)
        except BadRequest as error:
            raise framework.bad_request(error) from error.__cause__
        try:
            name = check_name(f"{self.options.prefix}:{key}")
        except ValueError as error:  # a value is too long, or is not valid Unicode
            raise framework.bad_request(BadRequest(f"@locked_view on {self.name}: {error}")) from error
        options = self.options
        lock = locks[options.using].on_behalf(name, owner_here("view", label), ttl=options.ttl, wait=options.wait)
        users = leases_of(request).setdefault((options.using, lock.name), [])
        if not users:
            self._refuse_transactions()
        return lock, users

    def _refuse_transactions(self) -> None:
        for connection in connections.all(initialized_only=True):
            if in_transaction(connection):
                raise RuntimeError(
                    f"@locked_view on {self.name} is inside a transaction of database {connection.alias!r}, which "
                    "would commit after the lock is released. If ATOMIC_REQUESTS opened it, put @locked_view on what "
                    "the URL leads to: on the function, class, subclass or method that handles the request, and not "
                    "only on one that it calls; and use functools.wraps() in your own decorators. Where that cannot "
                    "be, as with an operation of django-ninja, put @transaction.non_atomic_requests on the URL's view "
                    "and @transaction.atomic below @locked_view. Otherwise move the transaction into the view."
                )

    def _refuse(self, request: HttpRequest, error: LockTakenError | QuorumUnavailableError) -> Any:
        """Return the answer to a request that did not get the lock."""
        on_busy = self.options.on_busy
        if callable(on_busy) and isinstance(error, LockTakenError):
            return on_busy(request, error)
        status = HTTPStatus.CONFLICT if callable(on_busy) else on_busy
        return response_to(request, error, status=status, details=self._programs)

    def _refuse_work_left(self, response: Any) -> None:
        """Refuse a response whose work would only be done after the lock is released."""
        if left := work_left(response):
            raise TypeError(
                f"@locked_view on {self.name}: the view returned {left}, which would run without the lock. Put "
                "@locked_view directly on the function or coroutine function that returns the response."
            )

    def _log_loss(self, lease: Lease) -> None:
        log.error(
            "the lock of view %s ended before the view did: %s (%s); another request may have run beside it%s",
            self.name,
            printable(lease.name),
            lease.reason,
            successor(lease),
            extra={"event": "view_lock_lost", "lock": lease.name, "view": self.name},
        )


def leases_of(request: Any) -> dict[tuple[str, str], list[Lease]]:
    """
    Return the leases under which a request already runs, by alias and name: it must not be refused by its own lock.

    A subclass may be decorated as its base class is, and a view may call others with its request, also some at once.
    Each of them has the lease once in the list, and the last to leave releases it.
    """
    leases: dict[tuple[str, str], list[Lease]] = vars(own_request(request)).setdefault("_redlock_leases", {})
    return leases


@contextmanager
def noted(lease: Lease, users: list[Lease]) -> Iterator[None]:
    """Note in the ``with`` block that a view runs under a lease of its request."""
    users.append(lease)
    try:
        yield
    finally:
        users.remove(lease)


def ensure_all(request: Any) -> None:
    """
    Make sure that all locks of a request, which enclose its transaction, are held for long enough for a commit.

    Raises:
        LockLostError: A lock is lost, or less than a twentieth of its ttl is left.
    """
    for users in list(leases_of(request).values()):
        for lease in users[:1]:
            lease.ensure(lease.ttl * MARGIN)


def keep_while_streaming(response: Any, lease: Lease) -> bool:
    """
    Let a streaming response release the lock at its end; return whether the response is streaming.

    That is when its iterator ends or raises, or when the server closes the response, as servers do even if the client
    has gone away, but under ASGI not if the iterator raises. If a middleware drops the response and returns another,
    the lease is dropped as well, and the lock is free within a second.
    """
    if not getattr(response, "streaming", False):
        return False
    release_when_dropped(lease)
    leases = [lease]

    def release() -> None:  # in any thread, so not async
        with suppress(IndexError):  # it was the second to notice the end
            release_and_note(leases.pop())

    def until_end(parts: Any) -> Iterator[Any]:
        try:
            yield from parts
        finally:
            release()

    async def auntil_end(parts: Any) -> AsyncIterator[Any]:
        try:
            async for part in parts:
                yield part
        finally:
            await sync_to_async(release)()

    wrapped, file = auntil_end if response.is_async else until_end, getattr(response, "file_to_stream", None)
    response._resource_closers.append(release)
    if getattr(type(response), "streaming_content", None) is not StreamingHttpResponse.streaming_content:
        response.streaming_content = wrapped(response.streaming_content)  # a class of its own, whose parts come thence
        if file is not None:
            response.file_to_stream = file
        return True
    # Neither streaming_content nor the iterator of a file, which refer to the response: if it were dropped, only the
    # garbage collector would find out. And to set streaming_content would keep the server from sending a file itself.
    parts, usual = response._iterator, vars(FileResponse)["_set_streaming_content"]
    another = inspect.isgenerator(parts)  # that of another lock, which has to end as well
    if getattr(type(response), usual.__name__, None) is usual and file is not None and not another:
        parts = iter(partial(file.read, response.block_size), b"")
    response._iterator = wrapped(parts)
    return True


def release_and_note(lease: Lease) -> None:
    """Release the lock of a view; log its loss if only the release shows it, because the view may have committed."""
    note_late_loss(lease, release_at_end(lease))


def response_to(
    request: HttpRequest, error: Refused, *, status: int = HTTPStatus.CONFLICT, details: bool = False
) -> HttpResponse:
    """
    Return the response to a request that did not get its lock: a page for people, problem details for programs.

    The response names the lock only if ``DEBUG`` is on. It has a ``Retry-After`` header and must not be cached.

    Args:
        request: The request; clients that prefer JSON, and those of a framework for programs, get problem details.
        error: What went wrong. :class:`QuorumUnavailableError` is always answered with 503.
        status: The status of the response if another holder has the lock: 409, 423 or 429.
        details: Whether the client gets problem details in any case.
    """
    problem, retry_after = problem_of(error, status)
    # The first type serves */* and clients that state no preference.
    preferred = request.get_preferred_type(["text/html", PROBLEM, "application/json"])
    response: HttpResponse
    if details or framework_of(type(request)).programs or preferred not in (None, "text/html"):
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
    """Report the views whose decorator has no key, locks nothing, or is inside the transaction of a request."""
    if not getattr(settings, "ROOT_URLCONF", None):
        return []
    atomic = any(entry["ATOMIC_REQUESTS"] for entry in connections.settings.values())
    messages: dict[str, CheckMessage] = {}
    within: dict[str, tuple[RequestLock, ...]] = {}
    taken: list[RequestLock] = []
    for pattern, arguments in _patterns(get_resolver()):
        view = pattern.callback
        owner = class_of(view)
        handlers = {*methods_of(owner), *actions_of(view).values()}
        callables = (view, *(getattr(owner, name, None) for name in handlers))
        if any(isinstance(inspect.unwrap(each), LockedView) for each in callables if callable(each)):
            text = f"The view of the URL pattern {str(pattern.pattern)!r} is not locked, and fails at a request."
            messages[text] = Error(text, hint=MISSING_KEY, id="redlock.E012")
        if owner is None:
            continue
        named = f"{owner.__module__}.{owner.__qualname__}"
        methods = [*actions_of(view)] or [name for name in owner.http_method_names if hasattr(owner, name)]
        for name, hidden in _hidden(view, owner, methods) if atomic else ():
            text = (
                f"{named}.{name}() hides the @locked_view of {hidden} from ATOMIC_REQUESTS: each request that it would "
                "lock fails, because its transaction is already open."
            )
            decorated = f"the class {owner.__name__}" if name == "dispatch" else f"{owner.__name__}.{name}()"
            messages.setdefault(
                f"{named}.{name}", Error(text, hint=f"Put @locked_view on {decorated} as well.", id="redlock.E013")
            )
        for text in _misplaced(owner, handlers):
            messages[text] = Error(text, id="redlock.E014")
        for method in (each.upper() for each in methods):
            own = locks_taken(view, method)
            taken += [*own, *(lock for _, lock in locks_later(view, method))]
            needed = set[str]() if _is_positional(pattern) else _needed(view, owner, method, own)
            for name in sorted(needed - arguments):
                text = (
                    f"{method} to the URL pattern {str(pattern.pattern)!r} fails: the key of @locked_view on {named} "
                    f"needs the argument {name!r}, and the pattern has {', '.join(sorted(arguments)) or 'none'}."
                )
                hint = "Name an argument that each of these URLs has, or decorate only the methods that have this one."
                messages.setdefault(f"{named} {name}", Warning(text, hint=hint, id="redlock.W015"))  # of many URLs, one
        within[named] = within.get(named, ()) + locks_within(view)
    for named, own in within.items():  # a class may have several URLs, and subclasses that have more
        if own and not any(each in taken for each in own):
            text = (
                f"@locked_view on {named} never locks a request: no URL leads to what is locked, or GET, HEAD, OPTIONS "
                "and TRACE alone, which take no lock."
            )
            hint = 'Name the methods, such as methods=["GET"], or remove the decorator.'
            messages[text] = Warning(text, hint=hint, id="redlock.W014")
    return list(messages.values())


def _hidden(view: Any, owner: Any, methods: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the methods of a view class that lead to a locked one and have no lock themselves, and what each hides."""
    actions = actions_of(view).values()
    for name in () if locks_before(view) else ("dispatch", *sorted(methods_of(owner)), *actions):
        if not locks_of(getattr(owner, name, None)):
            bases = (base for base, method in chain(owner, name) if locks_of(method))
            yield from ((name, f"{base.__module__}.{base.__qualname__}") for base in bases)
    for method in (each.upper() for each in methods) if handles(owner) else ():
        handler = "dispatch" if dispatches(owner) else handler_of(owner, actions_of(view), method)
        taken = locks_taken(view, method)
        for name, later in locks_later(view, method):
            if not any(_is_same(later, each) for each in taken):
                yield handler, f"{owner.__module__}.{owner.__qualname__}.{name}()"


def _is_same(one: RequestLock, other: RequestLock) -> bool:
    """Return whether two decorators have one lock, which a request takes once."""
    if not (isinstance(one, Options) and isinstance(other, Options)):
        return False
    return (one.key, one.using, one.prefix) == (other.key, other.using, other.prefix)


def _misplaced(owner: Any, handlers: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with locked methods that handle no request, which a decorator above hid from their class."""
    for base in owner.__mro__:
        for name, method in vars(base).items():
            if locks_of(method) and name not in handlers and name != "dispatch":
                try:
                    check_handler(base, name, f"{base.__module__}.{base.__qualname__}.{name}")
                except TypeError as error:
                    yield str(error)


def _is_positional(pattern: URLPattern) -> bool:
    """Return whether a pattern passes arguments without names, so that only the view knows them."""
    regex = pattern.pattern.regex
    return bool(regex.groups > len(regex.groupindex))


def _needed(view: Any, owner: Any, method: str, locks: Iterable[RequestLock]) -> set[str]:
    """Return the arguments that a request must have for its locks; a default of the method that handles it will do."""
    handler = getattr(owner, handler_of(owner, actions_of(view), method), None)
    parameters = inspect.signature(handler).parameters.values() if callable(handler) else ()
    defaults = {each.name for each in parameters if each.default is not each.empty}
    return {name for lock in locks if isinstance(lock, Options) for name in arguments_of(lock.key)} - defaults


def _patterns(resolver: URLResolver, outer: frozenset[str] = frozenset()) -> Iterator[tuple[URLPattern, set[str]]]:
    """Yield all patterns of the URLs, each with the names of the arguments that it passes to its view."""
    for pattern in resolver.url_patterns:
        own = pattern.default_kwargs if isinstance(pattern, URLResolver) else pattern.default_args
        arguments = outer | {*pattern.pattern.regex.groupindex, *own}
        if isinstance(pattern, URLResolver):
            yield from _patterns(pattern, arguments)
        else:
            yield pattern, {*arguments}
