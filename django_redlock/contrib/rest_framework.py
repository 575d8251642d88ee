"""
Django REST framework: views under locks, and errors about locks as problem details.

    REST_FRAMEWORK = {"EXCEPTION_HANDLER": "django_redlock.contrib.rest_framework.exception_handler"}
"""

import inspect
from functools import wraps
from typing import Any

from django.core.exceptions import BadRequest
from django.http import HttpRequest
from rest_framework.exceptions import ParseError
from rest_framework.response import Response
from rest_framework.views import exception_handler as handle_exception
from rest_framework.views import set_rollback

from ..exceptions import LockTakenError, QuorumUnavailableError, StaleTokenError
from ..views import PROBLEM, Guard, Options, guarded, problem_of


def exception_handler(error: Exception, context: dict[str, Any]) -> Any:
    """
    Turn an error about a lock into problem details (RFC 9457); leave every other error to the framework.

    The status is 409 if another owner holds the lock or has overtaken this holder, and 503 if too few nodes answer,
    both with ``Retry-After``. A lost lock has no response of its own, because only the view knows whether its work was
    committed.
    """
    if not isinstance(error, LockTakenError | QuorumUnavailableError | StaleTokenError):
        return handle_exception(error, context)
    set_rollback()
    problem, retry_after = problem_of(error)
    headers = {"Retry-After": str(retry_after), "Cache-Control": "no-store"}
    return Response(problem, status=problem["status"], headers=headers, content_type=PROBLEM)


def lock_api_view(view: type, options: Options) -> type:
    """
    Lock an APIView or a ViewSet, after authentication, permissions and throttles, and around the transaction.

    The framework looks up the handler after ``initial()`` has accepted the request; the lock is taken at that point.
    """
    name = f"{view.__module__}.{view.__qualname__}"
    dispatch, initial = view.dispatch, view.initial  # type: ignore[attr-defined]
    signature = inspect.signature(lambda request, *args, **kwargs: None)
    guard = Guard(name, signature, options, below=getattr(dispatch, "_non_atomic_requests", set()))

    @wraps(dispatch)
    def locked_dispatch(self: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return dispatch(self, request, *args, **kwargs)

    @wraps(initial)
    def locked_initial(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        initial(self, request, *args, **kwargs)
        method = request.method.lower()
        if method in self.http_method_names and hasattr(self, method):
            setattr(self, method, _locked_handler(guard, getattr(self, method)))

    locked_dispatch._non_atomic_requests = guard.exempt  # type: ignore[attr-defined]
    view.dispatch, view.initial = locked_dispatch, locked_initial  # type: ignore[attr-defined]
    return view


def _locked_handler(guard: Guard, handler: Any) -> Any:
    locked = guarded(guard, handler)

    @wraps(handler)
    def handle(request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return locked(request, *args, **kwargs)
        except BadRequest as error:  # the framework does not know BadRequest
            raise ParseError(str(error.__cause__ or error)) from error

    return handle
