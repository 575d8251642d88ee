"""
Respond to a request that did not get a lock (internal).

People get a page; programs get problem details (RFC 9457).
"""

import logging
import math
from collections.abc import Callable
from http import HTTPStatus
from inspect import signature
from typing import Any, Literal, get_args

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.utils.cache import patch_cache_control, patch_vary_headers
from django.utils.translation import gettext_lazy, ngettext

from ..exceptions import LockTakenError, QuorumUnavailableError, StaleTokenError

Refused = LockTakenError | QuorumUnavailableError | StaleTokenError
BusyStatus = Literal[409, 423, 429]
OnBusy = BusyStatus | Callable[[HttpRequest, LockTakenError], Any]

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
BUSY = get_args(BusyStatus)

log = logging.getLogger("django_redlock")


def check_on_busy(on_busy: OnBusy) -> OnBusy:
    """
    Return *on_busy* if it is a valid status or function.

    Raises:
        TypeError: *on_busy* is neither a status nor a blocking function of two arguments.
        ValueError: *on_busy* is a status other than 409, 423 or 429.
    """
    if iscoroutinefunction(on_busy) or not (isinstance(on_busy, int) or callable(on_busy)):
        raise TypeError(f"on_busy must be a status or a function that is not a coroutine function, not {on_busy!r}.")
    if isinstance(on_busy, int) and on_busy not in BUSY:
        raise ValueError(f"on_busy must be 409, 423, 429 or a function, not {on_busy!r}.")
    if not isinstance(on_busy, int) and not _takes_two(on_busy):
        raise TypeError(f"on_busy is called with the request and the error, which {on_busy!r} does not take.")
    return on_busy


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a function in C may have no signature
        return True
    return True


def refuse(request: HttpRequest, error: LockTakenError | QuorumUnavailableError, on_busy: OnBusy) -> Any:
    """Return the response of *on_busy* if the lock is taken, and 503 if too few nodes answered."""
    if isinstance(error, LockTakenError) and callable(on_busy):
        return on_busy(request, error)
    return response_to(request, error, status=409 if callable(on_busy) else on_busy)


def response_to(request: HttpRequest, error: Refused, *, status: int = HTTPStatus.CONFLICT) -> HttpResponse:
    """
    Return the response to a request that did not get its lock, as a page or as problem details.

    The response names the lock only if ``DEBUG`` is on. It has a ``Retry-After`` header and must not be cached.

    Args:
        request: The request; clients that prefer JSON, and those of Django REST framework, get problem details.
        error: What went wrong. :class:`QuorumUnavailableError` is always answered with 503.
        status: The status of the response if another holder has the lock: 409, 423 or 429.
    """
    problem, retry_after = problem_of(error, status)
    as_json = is_api(request) or _prefers_json(request)
    response = _json(problem) if as_json else _page(request, problem)
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
        retry_after = _retry_after(getattr(error, "retry_after", None))
        log.info("view lock taken: %s", error, extra={"event": "view_lock_taken", "lock": error.name})
    title, detail = SAYINGS[status]
    again = ngettext("Try again in %(n)d second.", "Try again in %(n)d seconds.", retry_after) % {"n": retry_after}
    problem = {"title": str(title), "status": int(status), "detail": f"{detail} {again}"}
    if settings.DEBUG:
        problem["debug"] = str(error)
    return problem, retry_after


def is_api(request: HttpRequest) -> bool:
    """Return whether Django REST framework handles the request; its clients are programs."""
    return hasattr(request, "accepted_renderer")


def _retry_after(seconds: float | None) -> int:
    return max(1, min(LONGEST_RETRY_AFTER, math.ceil(seconds or 0)))


def _prefers_json(request: HttpRequest) -> bool:
    # The first type serves */* and clients that state no preference.
    preferred = request.get_preferred_type(["text/html", PROBLEM, "application/json"])
    return preferred is not None and preferred != "text/html"


def _json(problem: dict[str, Any]) -> HttpResponse:
    return JsonResponse(problem, status=problem["status"], content_type=PROBLEM)


def _page(request: HttpRequest, problem: dict[str, Any]) -> HttpResponse:
    try:
        content = render_to_string(TEMPLATE, problem, request)
    except TemplateDoesNotExist:  # a project without templates, or without our app
        return HttpResponse(problem["detail"], status=problem["status"], content_type="text/plain; charset=utf-8")
    return HttpResponse(content, status=problem["status"])
