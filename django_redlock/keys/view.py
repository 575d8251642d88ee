"""The key of a view or a command: a template, a short name such as ``user``, a function, or a list of these."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from difflib import get_close_matches
from enum import Enum
from functools import partial
from inspect import Signature, signature
from string import Formatter
from typing import Any, Literal, ParamSpec, Protocol
from uuid import UUID

from django.core.exceptions import BadRequest, ImproperlyConfigured
from django.http import HttpRequest

from ..engine.functions import makes_coroutine
from .text import digest, escaped, in_utc

P = ParamSpec("P")

ShortName = Literal["user", "user_or_ip", "session", "ip", "path"]
"""The short names without a parameter, listed so that editors offer them; any other text is a template."""

Written = str | Sequence[object]
"""What a function in the key of a view returns: a text, or parts to join."""


class Keywords(Protocol):
    """A function that takes one argument by its place and others by name."""

    def __call__(self, first: Any, /, **others: Any) -> str:
        """Return a key, or a part of one."""


# pyright's strict mode knows the parameters of a lambda from the form that has as many; Callable[P, Written] has none.
Lambda = (
    Callable[[Any], Written]
    | Callable[[Any, Any], Written]
    | Callable[[Any, Any, Any], Written]
    | Callable[[Any, Any, Any, Any], Written]
    | Keywords
)
Key = ShortName | str | Lambda | Callable[P, Written] | Sequence[str | Lambda] | Sequence[str | Callable[..., Written]]

SURROGATE = re.compile("[\ud800-\udfff]")
SHOWN_VALUE = 120  # characters of a value that stay readable in the lock's name


@dataclass(frozen=True, slots=True)
class ViewCall:
    """One call of a view, with its arguments as passed, including the request, and by name."""

    request: HttpRequest
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: Mapping[str, Any]


class MissingError(Exception):
    """A part of a key has no value; the error says why, and whether the client is to blame."""

    def __init__(self, why: str, client: bool = False) -> None:
        super().__init__(why)
        self.client = client


@dataclass(frozen=True, slots=True)
class _Field:
    """A part of a key that differs from request to request: its text in the key, and the way to find its values."""

    written: str
    find: Callable[[ViewCall], tuple[object, ...]]
    argument: str = ""
    """The argument of the view in which the values are; empty if they are elsewhere, or nobody knows."""


class ViewKey:
    """
    A parsed key: a sequence of texts and fields.

    Different values never give the same name. Values are escaped, so they contain none of the key's separators, and
    two fields always have a separator between them.
    """

    decorator = "locked_view"
    place = "argument of the view"
    field, examples = "{pk}", "{pk} or {request.user.pk}"
    occasion = "request"

    def __init__(self, view: str, key: Key[...], signature: Signature) -> None:
        self._view = view
        self._key = key
        self._raw = callable(key)  # a callable alone writes the whole key, so nothing is escaped
        parameters = signature.parameters.values()
        self._open = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self._names = {each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
        self._parts = self._read(key)
        texts = [part for part in self._parts if isinstance(part, str)]
        self._special = frozenset("%:") | {sign for text in texts for sign in text if not sign.isalnum()}
        if len(texts) == len(self._parts):
            self.check_constant("".join(texts))
        self._check_separators()

    def resolve(self, call: ViewCall) -> str:
        """
        Return the key of one request.

        Raises:
            BadRequest: The client left out a value that the key needs.
            ImproperlyConfigured: The key has no value for another reason.
        """
        return "".join(part if isinstance(part, str) else self._value(part, call) for part in self._parts)

    def _value(self, field: _Field, call: ViewCall) -> str:
        try:
            texts = [text_of(value) for value in field.find(call)]
            return ":".join(texts if self._raw else map(self._escape, texts))
        except MissingError as missing:
            message = self._message(f"{field.written} has no value for this {self.occasion}: {missing}")
            raise (BadRequest if missing.client else ImproperlyConfigured)(message) from missing

    def _escape(self, text: str) -> str:
        shown = escaped(text[:SHOWN_VALUE], self._special)
        if len(text) <= SHOWN_VALUE:
            return shown
        return f"{shown}%h{digest(text)}"  # unlike any escaped value: h is no hexadecimal digit

    # Reading

    def _read(self, key: Key[...]) -> list[str | _Field]:
        if isinstance(key, str):
            if not key:
                raise self._error("it must not be empty")
            return self.read_source(key) or self._read_template(key)
        if callable(key):
            if makes_coroutine(key):
                raise self._error("a callable must not be a coroutine function; it is called in a thread and may block")
            return [_Field("the callable", lambda call: (_joined(key(*call.args, **call.kwargs)),))]
        if not isinstance(key, list | tuple) or not key:
            raise self._error(f"it must be a str, a callable or a list of these, not {key!r}")
        parts: list[str | _Field] = []
        for index, item in enumerate(key):
            if not isinstance(item, str) and not callable(item):
                raise self._error(f"its part {index} must be a str or a callable, not {item!r}")
            parts += [":"] if index else []
            parts += self._read(item)
        return parts

    def read_source(self, text: str) -> list[str | _Field]:
        """Return the field of a short name such as ``user``, or an empty list if *text* is not a short name."""
        source, _, argument = text.partition(":")
        if text in SOURCES:
            return [_Field(repr(text), SOURCES[text])]
        if source not in SOURCES_OF or "{" in text:
            return []
        if not argument:
            raise self._error(f"{source!r} must say which, such as '{source}:{SOURCES_OF[source].example}'")
        if source == "kwarg":
            self._check_root(argument, text)
        own = argument if source == "kwarg" else ""
        return [_Field(repr(text), partial(SOURCES_OF[source].find, argument), own)]

    def _read_template(self, text: str) -> list[str | _Field]:
        parts: list[str | _Field] = []
        try:
            pieces = list(Formatter().parse(text))
        except ValueError as error:
            raise self._error(f"{text!r} is not a template ({error}); write a field as {self.field}") from None
        for literal, path, spec, conversion in pieces:
            parts += [literal] if literal else []
            if path is not None:
                parts.append(self._read_field(path, bool(spec or conversion)))
        return parts

    def _read_field(self, path: str, formatted: bool) -> _Field:
        names = path.split(".")
        if formatted or not all(name.isidentifier() and not name.startswith("_") for name in names):
            raise self._error(
                f"{{{path}}} must be an {self.place} or an attribute of one, such as {self.examples}: "
                "no calls, indexes, formats, or names that begin with an underscore"
            )
        self._check_root(names[0], f"{{{path}}}")
        return _Field(f"{{{path}}}", partial(_find_path, names), names[0])

    def _check_root(self, name: str, written: str) -> None:
        if name == "request" or name in self._names or self._open:
            return
        known = ", ".join(sorted(self._names)) or "none"
        raise self._error(f"{written!r} names no {self.place} (it has {known})")

    def check_constant(self, text: str) -> None:
        """Refuse a constant key that was meant to differ between requests: strangers would share one lock."""
        for word in re.findall(r"\w+", text):
            close = get_close_matches(word.lower(), [*SOURCES, *SOURCES_OF], n=1, cutoff=0.85)
            if word in self._names or close:
                meant = f"'{{{word}}}'" if word in self._names else repr(close[0])
                raise self._error(
                    f"it is the same for every request; did you mean {meant}? If one lock for everybody is meant, "
                    f"write lambda request, **kwargs: {text!r}"
                )

    def _check_separators(self) -> None:
        after_field = False
        for part in self._parts:
            separates = isinstance(part, str) and any(not sign.isalnum() and sign != "%" for sign in part)
            if isinstance(part, _Field) and after_field:
                raise self._error(
                    f"put a separator such as ':' before {part.written}, or different values look the same"
                )
            after_field = isinstance(part, _Field) or (after_field and not separates)

    def _error(self, what: str) -> ImproperlyConfigured:
        return ImproperlyConfigured(self._message(what))

    def _message(self, what: str) -> str:
        return f"@{self.decorator} on {self._view}, key {self._key!r}: {what}."


def arguments_of(key: Key[...]) -> set[str]:
    """Return the arguments of a view, besides the request, that a valid key of it needs, as far as the key shows."""
    parts = ViewKey("", key, signature(lambda request, **others: None))._parts
    return {part.argument for part in parts if isinstance(part, _Field)} - {"", "request"}


def text_of(value: object) -> str:
    """Return the text of a value if the text identifies it completely; otherwise raise MissingError."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, datetime):
        value = in_utc(value)
    if value is None or value == "":
        raise MissingError("it is empty")
    if not isinstance(value, str | int | UUID | date):
        raise MissingError(
            f"a {type(value).__name__} cannot be part of a lock's name; name a str, an int or a UUID, such as its pk"
        )
    return str(value)


def _joined(value: object) -> object:
    """Return a callable's result, with the parts of a list joined into one text."""
    if isinstance(value, tuple | list):
        return ":".join(escaped(text_of(part), frozenset("%:")) for part in value)
    return value


# Where values come from


def _find_path(names: list[str], call: ViewCall) -> tuple[object, ...]:
    if names[0] not in call.values:
        others = f", only {', '.join(call.kwargs)}" if call.kwargs else ""
        raise MissingError(f"there is no {names[0]!r}{others}")
    try:
        value = call.values[names[0]]
        for name in names[1:]:
            value = getattr(value, name)
    except AttributeError as error:
        raise MissingError(f"{type(error).__name__}: {error}") from None
    return (value,)


def _find_user(call: ViewCall) -> tuple[object, ...]:
    user = getattr(call.request, "user", None)
    if user is None:
        raise MissingError("there is no request.user; add AuthenticationMiddleware")
    if not user.is_authenticated:
        raise MissingError("nobody is logged in; put @login_required above @locked_view, or use 'user_or_ip'")
    return ("user", user.pk)


def _find_ip(call: ViewCall) -> tuple[object, ...]:
    address = call.request.META.get("REMOTE_ADDR")
    if not address:
        raise MissingError("the server passes no REMOTE_ADDR, as behind a Unix socket; set it in a middleware")
    return ("ip", address)


def _find_user_or_ip(call: ViewCall) -> tuple[object, ...]:
    user = getattr(call.request, "user", None)
    return _find_user(call) if user is not None and user.is_authenticated else _find_ip(call)


def _find_session(call: ViewCall) -> tuple[object, ...]:
    key = getattr(getattr(call.request, "session", None), "session_key", None)
    if not key:
        raise MissingError("the session has not been saved yet; use 'user_or_ip'")
    return ("session", digest(key))  # a reader of the plain key could take over the session


def _find_header(name: str, call: ViewCall) -> tuple[object, ...]:
    value = call.request.headers.get(name)
    if not value:
        raise MissingError(f"the client sent no header {name}", client=True)
    return ("header", name.lower(), digest(value))  # the value may be a secret, as in Authorization


def _find_post(name: str, call: ViewCall) -> tuple[object, ...]:
    form = call.request.data if hasattr(call.request, "data") else call.request.POST  # data is Django REST framework's
    return ("post", name, _sent(form.get(name) if hasattr(form, "get") else None, name))


def _sent(value: object, name: str) -> object:
    """Return what the client sent if it can be part of a key: JSON may have anything in place of a text."""
    if value is None or value == "":
        raise MissingError(f"the client sent no {name}", client=True)
    if not isinstance(value, str | int):
        kind = {list: "a list", dict: "an object", float: "a fraction"}.get(type(value), type(value).__name__)
        raise MissingError(f"the client's {name} must be a text or a whole number, not {kind}", client=True)
    if SURROGATE.search(str(value)):
        raise MissingError(f"the client's {name} has half of a surrogate pair, which UTF-8 cannot encode", client=True)
    return value


@dataclass(frozen=True, slots=True)
class _Source:
    find: Callable[[str, ViewCall], tuple[object, ...]]
    example: str


SOURCES: Mapping[str, Callable[[ViewCall], tuple[object, ...]]] = {
    "user": _find_user,
    "user_or_ip": _find_user_or_ip,
    "session": _find_session,
    "ip": _find_ip,
    "path": lambda call: ("path", call.request.path),
}
SOURCES_OF: Mapping[str, _Source] = {
    "header": _Source(_find_header, "Idempotency-Key"),
    "get": _Source(lambda name, call: ("get", name, _sent(call.request.GET.get(name), name)), "id"),
    "post": _Source(_find_post, "id"),
    "kwarg": _Source(lambda name, call: ("kwarg", name, *_find_path([name], call)), "pk"),
}
