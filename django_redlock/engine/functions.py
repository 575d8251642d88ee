"""
Functions that only begin their work when they are called, so that a lock around the call protects nothing (internal).
"""

import contextlib
from collections.abc import Callable
from functools import partial
from inspect import (
    isasyncgen,
    isasyncgenfunction,
    isawaitable,
    iscoroutine,
    iscoroutinefunction,
    isgenerator,
    isgeneratorfunction,
)
from typing import Any


def makes_generator(function: Callable[..., Any]) -> bool:
    """Return whether the body of *function* runs when its result is iterated over, or entered in a ``with`` block."""
    # What contextlib decorates, or transaction.atomic, which is made with it, returns what the function returns. Other
    # decorators may run through the generator themselves.
    while getattr(function, "__globals__", None) is vars(contextlib) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return _is(isgeneratorfunction, function) or _is(isasyncgenfunction, function)


def makes_coroutine(function: Callable[..., Any]) -> bool:
    """Return whether the body of *function* runs when its result is awaited."""
    return _is(iscoroutinefunction, function)


def _is(kind: Callable[[Any], bool], function: Any) -> bool:
    """Return whether a function, or the ``__call__`` of an object, is of *kind*."""
    while isinstance(function, partial):
        function = function.func
    return kind(function) or (not isinstance(function, type) and kind(getattr(function, "__call__", None)))  # noqa: B004


def work_left(result: Any) -> str:
    """Return what a function returned in place of its work, and close that; an empty text if the work is done."""
    of_block = type(result).__module__ == "contextlib" and hasattr(result, "gen")  # made by @contextmanager
    inner = result.gen if of_block else result
    if isgenerator(inner) or iscoroutine(inner):
        inner.close()
    if of_block:
        return "a context manager"
    if isgenerator(inner) or isasyncgen(inner):
        return "a generator"
    return "an awaitable" if isawaitable(inner) else ""


def name_of(function: Any) -> str:
    """Return the name of a function, or of another object that can be called, for people."""
    return str(getattr(function, "__qualname__", None) or repr(function))
