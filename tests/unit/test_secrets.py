"""No secret reaches a text that people see."""

import dataclasses
from contextlib import suppress
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

import pytest
from django.test import RequestFactory
from django.views.debug import ExceptionReporter

import django_redlock
from django_redlock import QuorumUnavailableError, compat
from django_redlock.core import protocol
from django_redlock.testing import memory_nodes

SECRET = "5ec7e7" * 6
HOLD_SECRETS = {"adopt", "secret", "secrets", "token", "value", "watch"}
OF_USERS = {"Answer", "Result", "Return", "Tile"}  # their value is that of a task or a page


def fields_of(kind: type) -> list[str]:
    if issubclass(kind, tuple):
        return list(getattr(kind, "_fields", ()))
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def classes_with_secrets() -> list[type]:
    """Return every named tuple and dataclass of the package that has a secret."""
    modules = []
    for module in walk_packages(django_redlock.__path__, "django_redlock."):
        with suppress(ImportError):  # a part for what is not installed
            modules.append(import_module(module.name))
    kinds = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    ours = [kind for kind in kinds if kind.__module__.startswith("django_redlock.") and kind.__name__ not in OF_USERS]
    return [kind for kind in ours if HOLD_SECRETS.intersection(fields_of(kind))]


def made(kind: Any) -> Any:
    """Return an object of *kind* whose secrets are all the same."""
    values = {name: SECRET if name in HOLD_SECRETS else f"the {name}" for name in fields_of(kind)}
    if issubclass(kind, tuple):
        return kind(**values)
    one = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(one, name, value)
    return one


def test_secret_is_not_in_a_repr():
    """Error pages and logs show the ``repr()`` of what holds a secret, with everything but the secret."""
    kinds = classes_with_secrets()

    assert {"Acquire", "Granted", "Ownership", "Ticket", "Wanted"} <= {kind.__name__ for kind in kinds}
    assert [kind for kind in kinds if SECRET in repr(made(kind))] == []
    assert repr(protocol.Release(("{a}",), SECRET)).startswith("Release(slugs=('{a}',), secret=..., tombstone=0.0, ")


def test_token_is_not_on_an_error_page():
    """Django's page about an error shows the local variables of every function on the way."""
    lock = compat.Lock(None, "report", timeout=30)
    lock.acquire()
    for node in memory_nodes():
        node.down = True

    with pytest.raises(QuorumUnavailableError) as raised:
        lock.extend(1)

    about = (raised.type, raised.value, raised.tb)
    page = ExceptionReporter(RequestFactory().get("/"), *about).get_traceback_html()
    assert "Ownership(token=..." in page
    assert lock.local.token.decode() not in page
