"""
The keys of tasks, views and commands: what distinguishes one piece of work from others of its kind (internal).

A key is made from the values of a call: those of a task's parameters (:class:`TaskKey`), of a request, or of a
command's options (:class:`ViewKey`). Different values never give the same key: in values, the characters of the text
around them are escaped, and a long value is cut and gets a digest.

By default the key of a task contains all arguments, bound to the parameters' names, with defaults, and in the form that
Celery's JSON gives them. So it does not matter how a call was written, or whether the key is computed before the
message is sent or after it has arrived, when a tuple has become a list and the keys of a dict are strings. Values of
different types give different keys. Equal moments in different time zones, and equal decimals, give the same key.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from difflib import get_close_matches
from enum import Enum
from functools import cache, partial
from hashlib import blake2b
from inspect import BoundArguments, Parameter, Signature, signature
from json.encoder import encode_basestring as quoted
from string import Formatter
from typing import Any, Literal, ParamSpec, Protocol
from uuid import UUID

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import BadRequest, ImproperlyConfigured
from django.db.models import Model
from django.http import HttpRequest

from .core.rules import nearest

P = ParamSpec("P")

CallKey = str | Sequence[str] | Callable[[BoundArguments], str] | None
"""What distinguishes the calls of a task, as its option ``key`` says."""

SHOWN = 100  # characters of a task's key that stay readable; a longer one is cut and gets a digest
CUT = "…~"
LONG = 1 << 63  # digits up to which Python writes a whole number whatever its limit is set to
SURROGATE = re.compile("[\ud800-\udfff]")
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
        elif isinstance(key, Iterable) and not isinstance(key, bytes):
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
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            text = key(bound)
            if not isinstance(text, str) or not text:
                raise TypeError(f"The function in key= must return a non-empty str, not {text!r}.")
        elif isinstance(key, str):
            text = self._from_template(self._values(args, kwargs))
        else:
            values = self._values(args, kwargs)
            text = _from_parameters(values if key is None else key, values)
        return f"{self._scope}:{_shortened(text)}" if text else self._scope

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
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _from_template(self, values: Mapping[str, Any]) -> str:
        formatter, text = Formatter(), ""
        for literal, field, form, conversion in self._template:
            text += literal
            if field is not None:
                value = formatter.convert_field(values[field], conversion)
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


def _from_parameters(names: Iterable[str], values: Mapping[str, Any]) -> str:
    # JSON marks its own end, so no value can look like the next parameter.
    return ",".join([f"{name}={_plain(values[name]) or _through_json(name, values[name])}" for name in names])


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
                return {"__enum__": [f"{type(value).__module__}.{type(value).__qualname__}", value.name]}
            if isinstance(value, datetime):
                value = _in_utc(value)
            if isinstance(value, Decimal):
                value = _without_trailing_zeros(value)
            if isinstance(value, timedelta):
                return {"__timedelta__": [value.days, value.seconds, value.microseconds]}
            if isinstance(value, complex):
                return {"__complex__": [value.real, value.imag]}
            if isinstance(value, (set, frozenset)):
                return {"__set__": sorted(json.dumps(member, cls=ArgumentEncoder, sort_keys=True) for member in value)}
            if hasattr(type(value), "model_dump") and not hasattr(type(value), "__json__"):
                return value.model_dump(mode="json")
            return super().default(value)

    return ArgumentEncoder()  # creating one takes longer than encoding a call's arguments


def _in_utc(moment: datetime) -> datetime:
    """Return a moment in UTC; one without a time zone, or whose year UTC does not have, as it is."""
    with suppress(OverflowError):
        return moment if moment.utcoffset() is None else moment.astimezone(UTC)
    return moment


def _without_trailing_zeros(value: Decimal) -> Decimal:
    """Return the number in the form that all equal numbers share."""
    if not value.is_finite():
        return value
    return Context(max(1, len(value.as_tuple().digits)), Emin=MIN_EMIN, Emax=MAX_EMAX).normalize(value) or Decimal(0)


_sorting = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _shortened(key: str) -> str:
    if len(key) <= SHOWN and key.isascii():
        return key
    # Half of a surrogate pair is valid in JSON, but not in UTF-8. Another text may spell its replacement.
    text = key.encode("utf-8", "backslashreplace").decode()
    if len(text) <= SHOWN and CUT not in text and text == key:
        return text
    return text[:SHOWN] + CUT + _digest(key)


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
        return f"{shown}%h{_digest(text)}"  # unlike any escaped value: h is no hexadecimal digit

    # Reading

    def _read(self, key: Key[...]) -> list[str | _Field]:
        if isinstance(key, str):
            if not key:
                raise self._error("it must not be empty")
            return self.read_source(key) or self._read_template(key)
        if callable(key):
            if iscoroutinefunction(key):
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
        close = get_close_matches(name, self._names, n=1)
        nearest = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(sorted(self._names)) or 'none'}"
        raise self._error(f"{written!r} names no {self.place}{nearest}")

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
        value = _in_utc(value)
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


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


# Where values come from


def _find_path(names: list[str], call: ViewCall) -> tuple[object, ...]:
    if names[0] not in call.values:
        close = get_close_matches(names[0], call.values, n=1)
        others = f", but {close[0]!r}" if close else f", only {', '.join(call.kwargs)}" if call.kwargs else ""
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
    return ("session", _digest(key))  # a reader of the plain key could take over the session


def _find_header(name: str, call: ViewCall) -> tuple[object, ...]:
    value = call.request.headers.get(name)
    if not value:
        raise MissingError(f"the client sent no header {name}", client=True)
    return ("header", name.lower(), _digest(value))  # the value may be a secret, as in Authorization


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


# For both


def escaped(text: str, special: frozenset[str]) -> str:
    """Return *text* with a percent sign and the code in place of each *special* character."""
    return "".join(_percent(character) if character in special else character for character in text)


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())
