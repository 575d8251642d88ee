"""
Django REST framework: errors about locks as problem details, and what is special about its views under a lock.

Views are locked with ``@locked_view``, which finds :data:`FRAMEWORK` by itself. Errors about other locks need this:

    REST_FRAMEWORK = {"EXCEPTION_HANDLER": "django_redlock.contrib.rest_framework.exception_handler"}
"""

from collections.abc import Iterable, Mapping
from typing import Any

from django.core.exceptions import BadRequest
from django.http import JsonResponse

from ..exceptions import LockTakenError, QuorumUnavailableError, StaleTokenError, missing_extra
from ..frameworks import Framework, is_framework
from ..keys.view import MissingError
from ..views import PROBLEM, problem_of

try:
    from rest_framework.exceptions import ParseError
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
    # Not the framework's own response, which the renderer that the client prefers would write, perhaps as HTML.
    return JsonResponse(problem, status=problem["status"], headers=headers, content_type=PROBLEM)


class RestFramework(Framework):
    """Its view classes authenticate and negotiate in ``dispatch()``; a ViewSet has actions."""

    authenticates = True
    programs = True
    handlers = "post(), update() or an @action"

    def actions(self, view: Any) -> Mapping[str, str] | None:
        """Return the actions with which ``as_view()`` of a ViewSet was called."""
        return getattr(view, "action_map", None)

    def may_handle(self, owner: Any, name: str) -> bool:
        """Return whether a method may be an action of a ViewSet, and is not what the framework itself calls."""
        if not hasattr(owner, "get_extra_actions"):
            return False
        return not any(is_framework(base) and name in vars(base) for base in owner.__mro__)

    def within(self, view: Any) -> Iterable[Any]:
        """Return the function below ``@api_view``, whose handler copies no marks from it."""
        if getattr(view, "__module__", "") != "rest_framework.decorators":
            return ()
        return [cell.cell_contents for cell in view.__closure__ or ()]

    def bad_request(self, error: BadRequest) -> Exception:
        """
        Return the framework's own error, because it does not know Django's.

        Clients get its text: only what was written for them, and neither the name of the lock nor the project's error.
        """
        parse_error: Exception = ParseError(str(why) if isinstance(why := error.__cause__, MissingError) else None)
        return parse_error


FRAMEWORK = RestFramework()
