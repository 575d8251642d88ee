"""
The key of a task: a template, names of its parameters, or a function; by default, all arguments of the call.

By default the key of a task contains all arguments, bound to the parameters' names, with defaults, and in the form that
Celery's JSON gives them. So it does not matter how a call was written, or whether the key is computed before the
message is sent or after it has arrived, when a tuple has become a list and the keys of a dict are strings. Values of
different types give different keys. Equal moments in different time zones, and equal decimals, give the same key.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache
from inspect import BoundArguments, Parameter, Signature, signature
from json.encoder import encode_basestring as quoted
from string import Formatter
from types import MethodType
from typing import Any

from django.db.models import Model

from ..core.names import is_text
from ..core.rules import nearest
from ..singleton.options import CallKey
from .text import decimal_text, digest, escaped, in_utc, without_trailing_zeros

SHOWN = 100  # characters of a task's key that stay readable; a longer one is cut and gets a digest
CUT = "…~"
LONG = 1 << 63  # digits up to which Python writes a whole number whatever its limit is set to
CONSTANTS = {None: "null", False: "false", True: "true"}


class TaskKey:
    """
    What distinguishes the calls of a task, and the names of their locks.

    Args:
        key: The option of this name.
        signature: The signature of the task's body, without ``self``.
        task: The task's name.
        group: The option of this name.
        version: The option of this name.

    Raises:
        TypeError: The key is neither names nor a template nor a function.
        ValueError: It names something that is not a parameter, or its template can give different calls the same key.
    """

    def __init__(
        self, key: CallKey, signature: Signature, task: str = "", group: str | None = None, version: int = 1
    ) -> None:
        self.signature = signature
        self._key = key
        kind, name = ("task", task) if group is None else ("tasks", group)
        # Nothing in the part before the key can be taken for a part of the key, or of the name of another task.
        self._scope = f"{kind}:{escaped(name, frozenset('%:@'))}" + (f"@{version}" if version != 1 else "")
        parameters = signature.parameters.values()
        self._ordinary = all(each.kind is Parameter.POSITIONAL_OR_KEYWORD for each in parameters)
        self._names = dict.fromkeys(signature.parameters)
        self._defaults = {each.name: each.default for each in parameters if each.default is not Parameter.empty}
        self._needed = self._names.keys() - self._defaults
        self._template: list[tuple[str, str | None, str | None, Any]] = []
        if isinstance(key, str):
            self._template = self._read_template(key)
            # In values, characters of the template are escaped: "{a}-{b}" must tell ("1-2", "3") from ("1", "2-3").
            self._special = frozenset("%").union(*(literal for literal, *_ in self._template))
        elif isinstance(key, Iterable) and not is_text(key):
            for name in key:
                self._check_parameter(name)
        elif key is not None and not callable(key):
            raise TypeError(f"key must be names of parameters, a template or a function, not {key!r}.")

    def lock_name(self, args: Any, kwargs: Any) -> str:
        """
        Return the name of the lock of one call.

        Raises:
            TypeError: The arguments do not fit the parameters, one of them cannot be part of a key, or the key's
                function does not return a str.
            ValueError: An argument is an unsaved model instance.
        """
        key = self._key
        if callable(key):
            text = key(self.bound(args, kwargs))
            if not isinstance(text, str) or not text:
                raise TypeError(f"The function in key= must return a non-empty str, not {text!r}.")
        elif isinstance(key, str):
            text = self._from_template(self._values(args, kwargs))
        else:
            values = self._values(args, kwargs)
            text = _from_parameters(values if key is None else key, values)
        return f"{self._scope}:{_shortened(text)}" if text else self._scope

    def bound(self, args: Any, kwargs: Any) -> BoundArguments:
        """
        Return the arguments of a call, including defaults, as a project's own functions get them.

        Raises:
            TypeError: The arguments do not fit the parameters.
        """
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound

    def canonical(self, args: Any, kwargs: Any) -> str:
        """
        Return all arguments of a call in the form that a key has, whatever the task's own key contains.

        Raises:
            TypeError: The arguments do not fit the parameters, or one cannot be part of a key.
            ValueError: An argument is an unsaved model instance.
        """
        values = self._values(args, kwargs)
        return _from_parameters(values, values)

    def _values(self, args: Any, kwargs: Any) -> Mapping[str, Any]:
        """
        Return the arguments of a call, including defaults, by parameter name and in the order of the parameters.

        Raises:
            TypeError: The arguments do not fit the parameters.
        """
        if self._ordinary and isinstance(args, (list, tuple)):
            given = dict(zip(self._names, args, strict=False))
            given.update(kwargs)
            # zip() hides arguments that are too many or given twice. Such calls are refused below.
            whole = len(given) == len(args) + len(kwargs)
            if whole and self._needed <= given.keys() <= self._names.keys():
                return {name: given[name] if name in given else self._defaults[name] for name in self._names}
        return self.bound(args, kwargs).arguments

    def _from_template(self, values: Mapping[str, Any]) -> str:
        formatter, text = Formatter(), ""
        for literal, field, form, conversion in self._template:
            text += literal
            if field is not None:
                value = values[field] if form or conversion else _alike(values[field])
                value = formatter.convert_field(value, conversion)
                text += escaped(format(value, form or ""), self._special)
        return text

    def _read_template(self, template: str) -> list[tuple[str, str | None, str | None, Any]]:
        if not template:
            raise ValueError("key='' gives all calls the same key; leave key out, or name the work: key='nightly'.")
        if template in self._names:
            raise ValueError(f"key={template!r} is a text, not a parameter; write key=({template!r},).")
        try:
            parts = list(Formatter().parse(template))
        except ValueError as error:
            raise ValueError(f"key={template!r} is not a template: {error}.") from None
        for _, field, form, _ in parts:
            if field is not None:
                self._check_parameter(field)
            if "{" in (form or ""):
                raise ValueError(f"key={template!r} has a format within a format; use a function instead.")
        if any(not literal for literal, field, *_ in parts[1:] if field is not None):
            raise ValueError(f"key={template!r} has two values side by side; put a separator between them.")
        return parts

    def _check_parameter(self, name: object) -> None:
        if name not in self._names:
            known = ", ".join(self._names) or "none"
            raise ValueError(
                f"key has {name!r}, which is not a parameter of the task (it has {known}){nearest(name, self._names)}"
            )


def _alike(value: Any) -> object:
    """Return what has one text for all equal values, and for the form in which one arrives in a worker."""
    kind = type(value)  # a subclass may have a text of its own
    if kind is datetime:
        return in_utc(value)
    if kind is Decimal:
        return decimal_text(value)
    if kind is tuple:
        return list(value)
    if kind in (set, frozenset):  # whose order differs between processes
        return "{" + ", ".join(sorted(map(repr, value))) + "}"
    if isinstance(value, Enum) and isinstance(value, (str, int)) and str(value) == Enum.__str__(value):
        return value.value
    return value


def _from_parameters(names: Iterable[str], values: Mapping[str, Any]) -> str:
    # JSON marks its own end, so no value can look like the next parameter.
    return ",".join([f"{name}={_plain(values[name]) or _through_json(name, values[name])}" for name in names])


def signature_of(body: Callable[..., Any], *, bound: bool = False) -> Signature:
    """
    Return the signature with which a body is called; with *bound*, without the argument that the framework puts first.

    If a decorator around the body declares parameters of its own, these count. Most decorators take anything and pass
    it on, so then the parameters of the body count. A decorator that changes the arguments, for example by adding one,
    must declare that: by parameters or by ``__signature__``.

    Raises:
        TypeError: The framework could not put its argument first.
    """
    if bound:
        body = MethodType(body, body)
    try:
        own = signature(body, follow_wrapped=False)
    except ValueError:
        if not bound:
            raise
        raise TypeError("The task needs a first parameter, for the argument that bind or takes_context adds.") from None
    anything = {each.kind for each in own.parameters.values()} == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}
    inner = getattr(body, "__wrapped__", None)
    if not anything or inner is None:
        return own
    return signature_of(inner, bound=isinstance(body, MethodType))


def _plain(value: Any) -> str | None:
    """
    Return the canonical form of a value that JSON leaves unchanged; None for any other value.

    A text with half of a surrogate pair is such a value: it is not printable.
    """
    kind = type(value)
    if kind is str:
        return quoted(value) if value.isascii() or value.isprintable() else None
    if kind is int:
        return str(value) if -LONG < value < LONG else None
    return CONSTANTS[value] if value is None or kind is bool else None


def _through_json(name: str, value: object) -> str:
    try:
        # After a round trip through JSON, the keys of dicts are strings and can be sorted.
        try:
            plain = json.loads(json.dumps(value))
        except TypeError:  # not plain JSON
            plain = json.loads(_encoder().encode(value))
    except (TypeError, ValueError, RecursionError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        name, value = _unusable(name, value)
        raise kind(
            f"The argument {name!r}, a {type(value).__name__}, cannot be part of a singleton's key: {error}. "
            "Name the parameters that matter with key=(...)."
        ) from error
    return _sorting.encode(plain)


def _unusable(name: str, value: object, depth: int = 3) -> tuple[str, object]:
    """Return the name and the value of the element that cannot be part of a key, such as ``args[1]``."""
    elements: Iterable[tuple[object, object]] = ()
    if isinstance(value, (list, tuple)):
        elements = enumerate(value)
    elif isinstance(value, Mapping):
        elements = value.items()
    for where, element in elements if depth else ():
        try:
            _encoder().encode(element)
        except (TypeError, ValueError, RecursionError):
            return (name, value) if element is value else _unusable(f"{name}[{where!r}]", element, depth - 1)
    return name, value


@cache
def _encoder() -> json.JSONEncoder:
    """Return an encoder of Celery's JSON, and of what other serializers carry."""
    try:
        from kombu.utils.json import JSONEncoder  # only here: views, commands and Django's tasks need no Celery
    except ImportError:
        from json import JSONEncoder  # type: ignore[assignment]

    class ArgumentEncoder(JSONEncoder):
        """Celery's JSON with model instances, sets, enums, durations and pydantic models."""

        def default(self, value: Any) -> Any:
            if isinstance(value, Model):
                if value._state.adding or value.pk is None:
                    raise ValueError(f"{value._meta.label} is not saved, so nothing identifies it yet")
                return {"__model__": [value._meta.label_lower, value.pk]}
            if isinstance(value, Enum):
                member = value.value if value.name is None else value.name  # unknown bits of a Flag have no name
                return {"__enum__": [f"{type(value).__module__}.{type(value).__qualname__}", member]}
            if isinstance(value, datetime):
                value = in_utc(value)
            if isinstance(value, Decimal):
                value = without_trailing_zeros(value)
            if isinstance(value, timedelta):
                return {"__timedelta__": [value.days, value.seconds, value.microseconds]}
            if isinstance(value, complex):
                return {"__complex__": [value.real, value.imag]}
            if isinstance(value, (set, frozenset)):
                return {"__set__": sorted(json.dumps(member, cls=ArgumentEncoder, sort_keys=True) for member in value)}
            if hasattr(type(value), "model_dump") and not hasattr(type(value), "__json__"):
                dumped = value.model_dump(mode="json")
                with suppress(Exception):  # not every model can be dumped as Python's objects
                    dumped = _dumped(value.model_dump(), dumped)
                return dumped
            return super().default(value)

    return ArgumentEncoder()  # creating one takes longer than encoding a call's arguments


def _dumped(value: Any, dumped: Any) -> Any:
    """Return a part of a pydantic model, as JSON has *dumped* it, in one form for all equal values."""
    match value, dumped:
        case dict(), dict() if len(value) == len(dumped):
            return {key: _dumped(*pair) for key, *pair in zip(dumped, value.values(), dumped.values(), strict=True)}
        case ((list() | tuple()), list()) if len(value) == len(dumped):
            return [_dumped(*pair) for pair in zip(value, dumped, strict=True)]
        case ((set() | frozenset()), list()):  # in an order that differs between processes
            return sorted(dumped, key=_sorting.encode)
        case datetime(), str() if value.tzinfo and datetime.fromisoformat(dumped) == value:
            return in_utc(value).isoformat().replace("+00:00", "Z")
        case Decimal(), str() if Decimal(dumped) == value:
            return decimal_text(value)
    return dumped


_sorting = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _shortened(key: str) -> str:
    if len(key) <= SHOWN and key.isascii():
        return key
    # Half of a surrogate pair is valid in JSON, but not in UTF-8. Another text may spell its replacement.
    text = key.encode("utf-8", "backslashreplace").decode()
    if len(text) <= SHOWN and CUT not in text and text == key:
        return text
    return text[:SHOWN] + CUT + digest(key)
