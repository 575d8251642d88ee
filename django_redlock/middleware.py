"""
Middleware: one request at a time on some paths, and responses to errors about locks.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.utils.decorators import sync_and_async_middleware
from django.utils.deprecation import MiddlewareMixin

from .core.names import is_text
from .core.rules import DEFAULT_ALIAS
from .engine.lease import Lease
from .exceptions import LockTakenError, QuorumUnavailableError, StaleTokenError
from .keys.view import ShortName, Written
from .views import Guard, Method, OnBusy, Options, check_methods, check_on_busy, response_to

OfRequest = Callable[[Any], Written]


def locked_paths(
    paths: Iterable[str | re.Pattern[str]],
    key: ShortName | str | OfRequest | Sequence[str | OfRequest] = "user_or_ip",
    *,
    ttl: float | None = None,
    wait: float | None = 0,
    methods: Iterable[Method] | None = None,
    on_busy: OnBusy = 409,
    using: str = DEFAULT_ALIAS,
) -> Callable[[Any], Any]:
    """
    Return a middleware that lets in one request at a time, for each value of *key*, on all of *paths* together.

    Assign the middleware to a name in one of your modules, and add that name to ``MIDDLEWARE``, below the middleware
    that the key needs, such as ``AuthenticationMiddleware``. The lock goes around the view, its transaction and the
    middleware below.

    Args:
        paths: Beginnings of paths, such as ``"/checkout/"``, or compiled regular expressions that are searched for.
            They match the path without the script's prefix. A str does not match what ``i18n_patterns`` serves under
            the prefix of a language; a check reports that.
        key: What to lock, as the name ``request:<key>``; see :func:`~django_redlock.views.locked_view`. A template has
            no argument but ``{request}``.
        ttl: Length of the lease in seconds; None means ``OPTIONS["ttl"]``.
        wait: How long a request tries, in seconds; 0 means one attempt. A waiting request occupies its worker.
        methods: The methods that are locked; None means all but GET, HEAD, OPTIONS and TRACE.
        on_busy: The response when the lock is taken; see :func:`~django_redlock.views.locked_view`.
        using: Alias in ``REDLOCK``.

    Raises:
        ImproperlyConfigured: The key can never be resolved.
        TypeError: An argument is of the wrong type.
        ValueError: A path does not begin with ``/``, or another argument cannot work.
    """
    matches = _matcher(paths)
    options = Options(key, ttl, wait, check_methods(methods), check_on_busy(on_busy), using, prefix="request")
    guard = _RequestGuard(options, matches)

    @sync_and_async_middleware
    def middleware(get_response: Any) -> Any:
        return guard.around(get_response)

    middleware.locks_path = matches  # type: ignore[attr-defined]  # for the check
    return middleware


class LockErrorMiddleware(MiddlewareMixin):
    """
    Respond to errors about locks that a view did not catch, as ``@locked_view`` responds to its own.

    The status is 409 when another owner has the lock or has overtaken this holder, and 503 when too few nodes answer.
    A lost lock stays an error: only the view knows whether its work was committed.
    """

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Return the response, or None for any other error."""
        if isinstance(exception, LockTakenError | QuorumUnavailableError | StaleTokenError):
            return response_to(request, exception)
        return None


class _RequestGuard(Guard):
    """Guard the requests on some paths, outside all transactions: these are committed before the guard continues."""

    def __init__(self, options: Options, matches: Callable[[str], bool]) -> None:
        super().__init__("locked_paths", inspect.signature(lambda request: None), options)
        self._matches = matches

    def applies(self, request: HttpRequest) -> bool:
        """Return whether the path and the method are locked."""
        return super().applies(request) and self._matches(request.path_info)

    def ensure(self, lease: Lease) -> None:
        """Do nothing: the response is there, and the release reports a lock that was lost."""


def _matcher(paths: Iterable[str | re.Pattern[str]]) -> Callable[[str], bool]:
    if isinstance(paths, str):
        raise TypeError(f"paths must be a list such as [{paths!r}], not the str {paths!r}.")
    if is_text(paths):
        raise TypeError(f"paths must be a list such as ['/checkout/'], not {type(paths).__name__}.")
    beginnings, patterns = [], []
    for path in paths:
        if isinstance(path, re.Pattern):
            patterns.append(path)
        elif not isinstance(path, str):
            raise TypeError(f"A path must be a str or a compiled regular expression, not {type(path).__name__}.")
        elif path.startswith("/"):
            beginnings.append(path)
        else:
            raise ValueError(f"A path begins with '/', unlike {path!r}; for a pattern pass re.compile({path!r}).")
    if not beginnings and not patterns:
        raise ValueError('paths=[] locks no request; name at least one, or write ["/"] for all.')
    start = tuple(beginnings)
    return lambda path: path.startswith(start) or any(pattern.search(path) for pattern in patterns)
