"""
Django REST framework: errors about locks as problem details (views are locked with ``@locked_view``).

    REST_FRAMEWORK = {"EXCEPTION_HANDLER": "django_redlock.contrib.rest_framework.exception_handler"}
"""

from typing import Any

from ..exceptions import LockTakenError, QuorumUnavailableError, StaleTokenError, missing_extra
from ..views import PROBLEM, problem_of

try:
    from rest_framework.response import Response
    from rest_framework.views import exception_handler as handle_exception
    from rest_framework.views import set_rollback
except ModuleNotFoundError as error:
    raise missing_extra(error, "rest-framework") from None


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
