"""
What a lock must know of the framework of a view class.

``views.py`` and ``db/requests.py`` know Django's own view classes. A package with other ones is in :data:`PACKAGES`,
with the object that describes them, which is imported when the first such class is locked.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from django.core.exceptions import BadRequest

_REST_FRAMEWORK = "django_redlock.contrib.rest_framework"
PACKAGES = {"adrf": _REST_FRAMEWORK, "rest_framework": _REST_FRAMEWORK}
"""The modules that know the view classes of a package, each with a :class:`Framework` named ``FRAMEWORK``."""


class Framework:
    """Django's own view classes; a subclass says what is different in those of another framework."""

    authenticates = False
    """Whether ``dispatch()`` authenticates: the lock is then taken later, around the method that handles a request."""
    programs = False
    """Whether the clients are programs, which get problem details in place of a page."""
    handlers = "post()"
    """Examples of methods that handle a request, for an error."""

    def actions(self, view: Any) -> Mapping[str, str] | None:
        """Return which method of an instance of a view class handles each HTTP method, if it says so."""
        return None

    def may_handle(self, owner: Any, name: str) -> bool:
        """Return whether a method of a view class may handle a request although its name does not say so."""
        return False

    def within(self, view: Any) -> Iterable[Any]:
        """Return the functions for which a view of the framework's own stands, and whose marks it does not copy."""
        return ()

    def bad_request(self, error: BadRequest) -> Exception:
        """Return the error that is answered with 400, for one about a value that the client sent or left out."""
        return error


DJANGO = Framework()


def framework_of(thing: Any) -> Framework:
    """Return the framework of a class, by its base classes, or of a function, by its module."""
    for each in getattr(thing, "__mro__", (thing,)):
        if (package := package_of(each)) in PACKAGES:
            return _framework(PACKAGES[package])
    return DJANGO


@cache
def _framework(module: str) -> Framework:
    framework: Framework = import_module(module).FRAMEWORK
    return framework


def is_framework(thing: Any) -> bool:
    """Return whether a class or function is Django's or another framework's, and not the project's."""
    package = package_of(thing)
    return package == "django" or package in PACKAGES


def package_of(thing: Any) -> str:
    """Return the name of the package that has a class or function."""
    return (getattr(thing, "__module__", None) or "").partition(".")[0]
