"""
The key of a call, which distinguishes it from other calls, and the lock's name made from it (internal).

By default the key contains all arguments, bound to the parameters' names, with defaults, and in the form that
Celery's JSON gives them. So it does not matter how a call was written, or whether the key is computed before the
message is sent or after it has arrived, when a tuple has become a list and the keys of a dict are strings. Values of
different types give different keys.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from inspect import BoundArguments, Parameter, Signature, signature
from json.encoder import encode_basestring as quoted
from string import Formatter
from typing import Any

from django.db.models import Model
from kombu.utils.json import JSONEncoder

from .options import Key, SingletonOptions, nearest

SHOWN = 100  # characters of a key that stay readable; a longer one is cut and gets a digest
CUT = "…~"
LONG = 1 << 63  # digits up to which Python writes a whole number whatever its limit is set to
CONSTANTS = {None: "null", False: "false", True: "true"}


class Parameters:
    """
    The parameters of a task's body, and the calls that fit them.

    Args:
        signature: The signature of the body, without ``self``.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        parameters = signature.parameters.values()
        self._ordinary = all(each.kind is Parameter.POSITIONAL_OR_KEYWORD for each in parameters)
        self._names = dict.fromkeys(signature.parameters)
        self._defaults = {each.name: each.default for each in parameters if each.default is not Parameter.empty}
        self._needed = self._names.keys() - self._defaults

    def bound(self, args: Any, kwargs: Any) -> BoundArguments:
        """
        Return the arguments of a call, including the defaults of those that it omits.

        Raises:
            TypeError: The arguments do not fit the parameters.
        """
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound

    def values(self, args: Any, kwargs: Any) -> Mapping[str, Any]:
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


def signature_of(body: Callable[..., Any]) -> Signature:
    """
    Return the signature with which a body is called.

    If a decorator around the body declares parameters of its own, these count. Most decorators take anything and pass
    it on, so then the parameters of the body count. A decorator that changes the arguments, for example by adding one,
    must declare that: by parameters or by ``__signature__``.
    """
    own = signature(body, follow_wrapped=False)
    anything = {each.kind for each in own.parameters.values()} == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}
    return signature(body) if anything else own


def check_key(key: Key, signature: Signature) -> None:
    """
    Check that *key* can be made from the parameters in *signature*.

    Raises:
        TypeError: It is neither names nor a template nor a function.
        ValueError: It names something that is not a parameter, or its template can give different calls the same key.
    """
    if key is None or callable(key):
        return
    if isinstance(key, str):
        _check_template(key, signature)
    elif isinstance(key, Iterable) and not isinstance(key, bytes):
        for name in key:
            _check_parameter(name, signature)
    else:
        raise TypeError(f"key must be names of parameters, a template or a function, not {key!r}.")


def lock_name(task: str, options: SingletonOptions, parameters: Parameters, args: Any, kwargs: Any) -> str:
    """
    Return the name of the lock of one call.

    Args:
        task: The task's name.
        options: Its options.
        parameters: Its parameters.
        args: The call's positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        TypeError: The arguments do not fit the parameters, one of them cannot be part of a key, or the key's
            function does not return a str.
        ValueError: An argument is an unsaved model instance.
    """
    scope, key = _scope(task, options.group, options.version), _key(options.key, parameters, args, kwargs)
    return f"{scope}:{_shortened(key)}" if key else scope


def canonical(parameters: Parameters, args: Any, kwargs: Any) -> str:
    """
    Return all arguments of a call in the form that a key has, whatever the task's own key contains.

    Raises:
        TypeError: The arguments do not fit the parameters, or one cannot be part of a key.
        ValueError: An argument is an unsaved model instance.
    """
    values = parameters.values(args, kwargs)
    return _from_parameters(values, values)


@lru_cache(maxsize=1024)
def _scope(task: str, group: str | None, version: int) -> str:
    """Return the part before the key; nothing in it can be taken for a part of the key or of another scope."""
    kind, name = ("task", task) if group is None else ("tasks", group)
    return f"{kind}:{_escaped(name, frozenset('%:@'))}" + (f"@{version}" if version != 1 else "")


def _key(key: Key, parameters: Parameters, args: Any, kwargs: Any) -> str:
    if callable(key):
        return _from_function(key(parameters.bound(args, kwargs)))
    values = parameters.values(args, kwargs)
    if isinstance(key, str):
        return _from_template(key, values)
    return _from_parameters(values if key is None else key, values)


def _from_parameters(names: Iterable[str], values: Mapping[str, Any]) -> str:
    # JSON marks its own end, so no value can look like the next parameter.
    return ",".join([f"{name}={_encoded(name, values[name])}" for name in names])


def _from_template(template: str, values: Mapping[str, Any]) -> str:
    parts, special = _parsed(template)
    formatter = Formatter()
    text = ""
    for literal, field, form, conversion in parts:
        text += literal
        if field is not None:
            value = formatter.convert_field(values[field], conversion)
            text += _escaped(format(value, form or ""), special)
    return text


@lru_cache(maxsize=1024)
def _parsed(template: str) -> tuple[list[tuple[str, str | None, str | None, Any]], frozenset[str]]:
    # In values, characters of the template are escaped: "{a}-{b}" must distinguish ("1-2", "3") from ("1", "2-3").
    parts = list(Formatter().parse(template))
    return parts, frozenset("".join(literal for literal, *_ in parts)) | {"%"}


def _escaped(text: str, special: frozenset[str]) -> str:
    return "".join(_percent(character) if character in special else character for character in text)


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())


def _from_function(text: object) -> str:
    if not isinstance(text, str) or not text:
        raise TypeError(f"The function in key= must return a non-empty str, not {text!r}.")
    return text


def _encoded(name: str, value: Any) -> str:
    plain = _plain(value)
    return _through_json(name, value) if plain is None else plain


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
        plain = json.loads(_encoder.encode(value))
    except (TypeError, ValueError, RecursionError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(
            f"The argument {name!r}, a {type(value).__name__}, cannot be part of a singleton's key: {error}. "
            "Name the parameters that matter with key=(...)."
        ) from error
    return _sorting.encode(plain)


class _Encoder(JSONEncoder):
    """Celery's JSON, and what other serializers carry: model instances, sets, enums, durations, pydantic models."""

    def default(self, value: Any) -> Any:
        if isinstance(value, Model):
            return {"__model__": [value._meta.label_lower, _saved(value)]}
        if isinstance(value, Enum):
            return {"__enum__": [f"{type(value).__module__}.{type(value).__qualname__}", value.name]}
        if isinstance(value, timedelta):
            return {"__timedelta__": [value.days, value.seconds, value.microseconds]}
        if isinstance(value, complex):
            return {"__complex__": [value.real, value.imag]}
        if isinstance(value, (set, frozenset)):
            return {"__set__": sorted(json.dumps(member, cls=_Encoder, sort_keys=True) for member in value)}
        if hasattr(type(value), "model_dump") and not hasattr(type(value), "__json__"):
            return value.model_dump(mode="json")
        return super().default(value)


# Creating an encoder takes longer than encoding a call's arguments.
_encoder = _Encoder()
_sorting = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _saved(instance: Model) -> Any:
    if instance._state.adding or instance.pk is None:
        raise ValueError(f"{instance._meta.label} is not saved, so nothing identifies it yet")
    return instance.pk


def _shortened(key: str) -> str:
    if len(key) <= SHOWN and key.isascii():
        return key
    text = key.encode(
        "utf-8", "backslashreplace"
    ).decode()  # half of a surrogate pair is valid in JSON, but not in UTF-8
    if len(text) <= SHOWN and CUT not in text:
        return text
    return text[:SHOWN] + CUT + blake2b(text.encode(), digest_size=16).hexdigest()


def _check_template(template: str, signature: Signature) -> None:
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"key={template!r} is not a template: {error}.") from None
    fields = [field for _, field, _, _ in parts if field is not None]
    if not template:
        raise ValueError("key='' gives all calls the same key; leave key out, or name the work: key='nightly'.")
    if template in signature.parameters:
        raise ValueError(f"key={template!r} is a text, not a parameter; write key=({template!r},).")
    for field in fields:
        _check_parameter(field, signature)
    if any("{" in (form or "") for _, _, form, _ in parts):
        raise ValueError(f"key={template!r} has a format within a format; use a function instead.")
    if any(not literal for literal, field, _, _ in parts[1:] if field is not None):
        raise ValueError(f"key={template!r} has two values side by side; put a separator between them.")


def _check_parameter(name: object, signature: Signature) -> None:
    if name not in signature.parameters:
        known = ", ".join(signature.parameters) or "none"
        raise ValueError(
            f"key has {name!r}, which is not a parameter of the task (it has {known})"
            f"{nearest(name, signature.parameters)}"
        )
