"""
Run a view under a lock: one request at a time for each order, user, or other value of the key.

The lock goes around the view's transaction. Under ``ATOMIC_REQUESTS``, Django would open the transaction around the
decorated view, so that the lock would be released before the commit. The decorator therefore keeps Django from opening
a transaction, and opens the same transactions itself, inside the lock.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from django.http import HttpRequest
from django.utils.decorators import method_decorator

from .conf import DEFAULT_ALIAS
from .core.rules import check_wait, optional_seconds
from .engine.mistakes import explained
from .keys import Key

View = TypeVar("View", bound=Callable[..., Any])

MISSING_KEY = "@locked_view needs a key in parentheses; write, for example, @locked_view('order:{pk}') or 'user_or_ip'."


@explained
def locked_view(
    key: Key,
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
    classes; a class of Django REST framework is locked after authentication and permissions.

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
    optional_seconds("ttl", ttl)
    return Decorator(Options(key, ttl, check_wait(wait), check_methods(methods), check_on_busy(on_busy), using))


class Decorator:
    """
    The result of :func:`locked_view`; as a class, so that the system checks find one that decorates nothing.

    Args:
        options: The checked options of :func:`locked_view`.
    """

    def __init__(self, options: "Options") -> None:
        self._options = options

    def __call__(self, view: Any) -> Any:
        """
        Return a view function or class that runs under its lock.

        Raises:
            TypeError: *view* is not a view, or the decorator has no key.
        """
        options = self._options
        if isinstance(view, HttpRequest):  # `key` is the view, and this is the view's first request
            raise TypeError(MISSING_KEY)
        if isinstance(view, type):
            return _lock_class(view, self, options)
        if not callable(view):
            raise TypeError(f"@locked_view decorates views, not {view!r}.")
        guard = Guard.of_view(view, options)
        return guarded_async(guard, view) if guard.asynchronous else guarded(guard, view)


def _lock_class(view: type, decorator: Any, options: Options) -> type:
    if hasattr(view, "perform_content_negotiation"):  # an APIView, so Django REST framework is installed
        from .contrib.rest_framework import lock_api_view  # only here: Django REST framework is optional

        return lock_api_view(view, options)
    if not hasattr(view, "dispatch"):
        raise TypeError(f"@locked_view decorates views; the class {view.__name__} has no dispatch().")
    locked: type = method_decorator(decorator, name="dispatch")(view)
    return locked
