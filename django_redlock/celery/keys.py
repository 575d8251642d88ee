"""
What tells two calls of a task apart: the key, and the name of the lock made from it.

By default the key is made of all arguments, bound to the parameters' names, with defaults, and in the form that
Celery's JSON has for them. So it does not matter how a call was written, nor whether it is computed before the
message was sent or after it arrived: a tuple is a list by then, and the keys of a dict are strings. Values of
different types give different keys.
"""

import json
from collections.abc import Iterable
from hashlib import blake2b
from inspect import BoundArguments, Signature
from string import Formatter
from typing import Any

from django.db.models import Model
from kombu.utils.json import JSONEncoder

from .options import Key, SingletonOptions, nearest

SHOWN = 100  # characters of a key that stay readable; a longer one is cut and gets a digest
CUT = "…~"


def check_key(key: Key, signature: Signature) -> None:
    """
    Check that *key* can be made from the parameters in *signature*.

    Raises:
        TypeError: It is none of names, template and function.
        ValueError: It names something that is not a parameter, or is a template that cannot tell calls apart.
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


def lock_name(task: str, options: SingletonOptions, signature: Signature, args: Any, kwargs: Any) -> str:
    """
    Return the name of the lock of one call.

    Args:
        task: The task's name.
        options: Its options.
        signature: Its parameters, without ``self``.
        args: The call's positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        TypeError: The arguments do not fit the parameters, one of them cannot be part of a key, or the key's
            function does not return a str.
        ValueError: An argument is an unsaved model instance.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return ":".join(filter(None, [_scope(task, options), _shortened(_key(options.key, bound))]))


def canonical(signature: Signature, args: Any, kwargs: Any) -> str:
    """
    Return all arguments of a call, as a key has them, whatever its key is made of.

    Raises:
        TypeError: The arguments do not fit the parameters, or one cannot be part of a key.
        ValueError: An argument is an unsaved model instance.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return _from_parameters(bound.arguments, bound)


def _scope(task: str, options: SingletonOptions) -> str:
    """Return the part before the key; nothing in it can be taken for a part of the key or of another scope."""
    kind, name = ("task", task) if options.group is None else ("tasks", options.group)
    return f"{kind}:{_escaped(name, set('%:@'))}" + (f"@{options.version}" if options.version != 1 else "")


def _key(key: Key, bound: BoundArguments) -> str:
    if key is None:
        return _from_parameters(bound.arguments, bound)
    if isinstance(key, str):
        return _from_template(key, bound)
    if callable(key):
        return _from_function(key(bound))
    return _from_parameters(key, bound)


def _from_parameters(names: Iterable[str], bound: BoundArguments) -> str:
    # JSON ends where it ends, so no value can look like the next parameter.
    return ",".join(f"{name}={_encoded(name, bound.arguments[name])}" for name in names)


def _from_template(template: str, bound: BoundArguments) -> str:
    # A character of the template itself is escaped in values: "{a}-{b}" must tell ("1-2", "3") from ("1", "2-3").
    parts = list(Formatter().parse(template))
    special = set("".join(literal for literal, *_ in parts)) | {"%"}
    formatter = Formatter()
    text = ""
    for literal, field, form, conversion in parts:
        text += literal
        if field is not None:
            value = formatter.convert_field(bound.arguments[field], conversion)
            text += _escaped(format(value, form or ""), special)
    return text


def _escaped(text: str, special: set[str]) -> str:
    return "".join(_percent(character) if character in special else character for character in text)


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())


def _from_function(text: object) -> str:
    if not isinstance(text, str) or not text:
        raise TypeError(f"The function in key= must return a str that is not empty, not {text!r}.")
    return text


def _encoded(name: str, value: object) -> str:
    try:
        # Once through JSON and back: then the keys of dicts are strings and can be sorted.
        plain = json.loads(json.dumps(value, cls=_Encoder))
    except (TypeError, ValueError, RecursionError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(
            f"The argument {name!r}, a {type(value).__name__}, cannot be part of a singleton's key: {error}. "
            "Name the parameters that matter with key=(...)."
        ) from error
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


class _Encoder(JSONEncoder):
    """Celery's JSON, and what other serializers carry: model instances, sets, pydantic models."""

    def default(self, value: Any) -> Any:
        if isinstance(value, Model):
            return {"__model__": [value._meta.label_lower, _saved(value)]}
        if isinstance(value, (set, frozenset)):
            return {"__set__": sorted(json.dumps(member, cls=_Encoder, sort_keys=True) for member in value)}
        if hasattr(type(value), "model_dump") and not hasattr(type(value), "__json__"):
            return value.model_dump(mode="json")
        return super().default(value)


def _saved(instance: Model) -> Any:
    if instance._state.adding or instance.pk is None:
        raise ValueError(f"{instance._meta.label} is not saved, so nothing identifies it yet")
    return instance.pk


def _shortened(key: str) -> str:
    text = key.encode("utf-8", "backslashreplace").decode()  # half of a surrogate pair is no Unicode, but is JSON
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
        raise ValueError("key='' makes all calls equal; leave key out, or name the work: key='nightly'.")
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
