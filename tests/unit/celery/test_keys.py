"""What makes two calls equal."""

import functools
import inspect
import json
import re
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import KEEP, Enum, IntFlag, StrEnum
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils.functional import lazystr
from django.utils.translation import gettext_lazy
from hypothesis import example, given
from hypothesis import strategies as st
from kombu.utils import json as celery_json

from django_redlock.celery import singleton_task


def sync(x: Any, y: Any = 2) -> None: ...


@pytest.fixture
def name(app):
    """Return the name of the lock of a call, given the body and the options of its task."""

    def name(*args: Any, function: Callable[..., Any] = sync, task: str = "shop.sync", **kwargs: Any) -> str:
        options = kwargs.pop("options", {})
        app.tasks.pop(task, None)
        return singleton_task(name=task, **options)(function).singleton.key(*args, **kwargs)

    return name


def test_key(name):
    """All arguments make the key, or some of them, a template, or a function; a group and a version are part of it."""
    assert name(7) == "task:shop.sync:x=7,y=2"
    assert name(1, 2, options={"key": ("x",)}) == name(1, 3, options={"key": ["x"]}) == "task:shop.sync:x=1"
    assert name(1, "b", options={"key": "{x}-{y}"}) == "task:shop.sync:1-b"
    assert name(date(2026, 1, 2), options={"key": "day:{x:%m}"}) == "task:shop.sync:day:01"
    assert name(7, options={"key": lambda call: f"shop-{call.arguments['x']}"}) == "task:shop.sync:shop-7"
    assert name(1, options={"version": 2}) == "task:shop.sync@2:x=1,y=2"
    assert name(1, task="a", options={"group": "stock"}) == name(1, task="b", options={"group": "stock"})
    assert name(1, task="stock") != name(1, task="a", options={"group": "stock"})


def test_values_cannot_look_like_other_arguments(name):
    """No text in one argument makes the key of two; a long one makes a name of its beginning and a digest."""
    template = {"options": {"key": "{x}-{y}"}}
    long = name("a" * 1_000_000)

    assert name('1,y="2"', "") != name("1", '2,y=""')
    assert name("1-2", "3", **template) != name("1", "2-3", **template)
    assert name("a" * 200, 1) != name("a" * 200, 2)
    assert name(name("a" * 200)) != name("a" * 200)
    assert long.startswith('task:shop.sync:x="aaaa')
    assert len(long) < 200


@pytest.mark.parametrize("key", [None, "{x}", lambda call: call.arguments["x"]])
@pytest.mark.parametrize("around", ["", "é", "z" * 200])
def test_half_of_a_surrogate_pair_is_told_from_its_spelling(name, key, around):
    """UTF-8 cannot encode it, so the key shows it as it is spelled in Python; a text that spells it has another key."""
    texts = [f"{around}\udc80", rf"{around}\udc80", f"{around}\udc81"]

    keys = {name(text, options={"key": key}) for text in texts}

    assert len(keys) == 3
    assert [key.encode() for key in keys]


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


def many(x: Any, *args: Any, **options: Any) -> None: ...


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((object(),), {}, TypeError, r"argument 'x', a object, .*Name the parameters that matter with key="),
        ((ENDLESS,), {}, ValueError, "argument 'x'"),
        ((10**5000,), {}, ValueError, "'x', a int, cannot be part"),  # Python refuses to write it
        ((User(pk=7),), {}, ValueError, r"argument 'x', a User, .*auth.User is not saved"),
        ((1, [0, {"a": object()}]), {}, TypeError, re.escape("argument \"args[0][1]['a']\", a object, cannot be part")),
        ((1,), {"other": object()}, TypeError, re.escape("argument \"options['other']\", a object, cannot be part")),
    ],
    ids=["object", "endless", "long number", "unsaved", "element", "option"],
)
def test_argument_that_has_no_key_is_named(name, args, kwargs, error, message):
    """The error about a value that no key can have names the parameter, or the element of it, and the remedy."""
    with pytest.raises(error, match=message):
        name(*args, function=many, **kwargs)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (("shop",), r"'shop', which is not a parameter .*x, y"),
        ("shop:{}", "'', which is not a parameter"),
        ("shop:{x.pk}", "'x.pk', which is not a parameter"),
        ("shop:{x", "not a template"),
        ("{x:{y}}", "format within a format"),
        ("{x}{y}", "separator between"),
        ("x", r"write key=\('x',\)"),
        ("", "gives all calls the same key"),
        (7, "names of parameters, a template or a function"),
        (lazystr("xy"), "names of parameters, a template or a function"),
    ],
)
def test_key_of_what_is_no_parameter_fails_at_once(key, message):
    """A key that names something else fails when the function is decorated."""
    with pytest.raises(ValueError if isinstance(key, str | tuple) else TypeError, match=message):
        singleton_task(key=key)(sync)


def test_function_must_return_text(name):
    """A function that returns something else is an error, not a key that many calls share by accident."""
    for result in (None, 7, ""):
        with pytest.raises(TypeError, match="must return a non-empty str"):
            name(7, options={"key": lambda call, result=result: result})


def test_models(name):
    """A model instance is its label and primary key, and a pydantic model its dumped dict."""

    class Order:  # what matters of one of pydantic's
        def model_dump(self, mode="python"):
            return {"id": 7, "mode": mode}

    one, same = User(pk=7, username="a"), User(pk=7, username="b")
    one._state.adding = same._state.adding = False

    assert name(one) == name(same) == 'task:shop.sync:x={"__model__":["auth.user",7]},y=2'
    assert name(Order()) == name({"mode": "json", "id": 7})


def one(a: Any) -> None: ...
def defaults(a: Any, b: Any = 2, c: Any = None) -> None: ...
def only_keywords(a: Any, *, b: Any = 2) -> None: ...
def only_positions(a: Any, /, b: Any = 2) -> None: ...
def anything(a: Any, *args: Any, **kwargs: Any) -> None: ...


def as_python_binds(call: inspect.BoundArguments) -> str:
    """Return the key of all arguments that Python has bound to the parameters."""
    return ",".join(
        f"{name}={json.dumps(value, separators=(',', ':'), sort_keys=True)}" for name, value in call.arguments.items()
    )


@pytest.mark.parametrize("body", [one, defaults, only_keywords, only_positions, anything])
def test_calls_are_bound_as_python_binds_them(app, body):
    """Whatever a call gives, twice or not at all, it has the values, or the error, of the signature's own binding."""
    ours = singleton_task(name="shop.sync")(body)
    pythons = singleton_task(name="shop.pythons", key=as_python_binds)(body)

    def outcome(task, args, kwargs):
        try:
            return task.singleton.key(*args, **kwargs).removeprefix(f"task:{task.name}:")
        except TypeError as error:
            return str(error)

    @given(
        st.lists(st.integers(0, 9), max_size=4),
        st.dictionaries(st.sampled_from("abcd"), st.integers(10, 19), max_size=4),
    )
    def agree(args, kwargs):
        assert outcome(ours, args, kwargs) == outcome(pythons, args, kwargs)

    agree()


def test_plain_values_need_no_way_through_json(make):
    """A value that is written without JSON looks in the key as it does in a list, which is always written with JSON."""
    key = make().singleton.key

    # Half of a surrogate pair is in the key as a digest, which also covers what is beside it.
    @given(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=10)  # a long one is cut
        | st.integers()
        | st.floats()
        | st.none()
        | st.booleans()
        | st.integers(-2, 2)
    )
    @example("\ud83d\ude00")
    @example('\x7f\x00"\\/\u2028')
    @example(1 << 63)
    @example(-(1 << 63))
    def same(value):
        name, _, text = key(value).partition("=")
        assert key([value]) == f"{name}=[{text}]"

    same()


def test_decorators_around_the_body(app):
    """A decorator that takes anything is believed to pass it on; of one that adds an argument, its signature counts."""

    def noted(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            return function(*args, **kwargs)

        return inner

    def with_session(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            return function("session", *args, **kwargs)

        parameters = list(inspect.signature(function).parameters.values())
        inner.__signature__ = inspect.Signature(parameters[1:])
        return inner

    @singleton_task(name="shop.noted", key=("shop_id",), autoretry_for=(OSError,), typing=False)
    @noted
    def plain(shop_id, since=None):
        pass

    @singleton_task(name="shop.session", key=("shop_id",))
    @with_session
    def given(session, shop_id, since=None):
        pass

    assert plain.singleton.key(7, "2020") == plain.singleton.key(shop_id=7) == "task:shop.noted:shop_id=7"
    with pytest.raises(TypeError, match="missing a required argument: 'shop_id'"):
        plain.delay(since=1)
    assert given.singleton.key(7, "2020") == given.singleton.key(7) == "task:shop.session:shop_id=7"
    assert not given.delay(7, "2020").duplicate
    assert given.delay(7).duplicate


def passing_on(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


def of_a_tenant(function):
    @functools.wraps(function)
    def inner(tenant, shop_id):
        return function(shop_id)

    return inner


def with_itself(function):
    @functools.wraps(function)
    def inner(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return inner


def plain(shop_id):
    pass


def bound(self, tenant, shop_id):
    pass


@pytest.mark.parametrize(
    ("decorators", "body", "options"),
    [
        ([of_a_tenant], plain, {}),
        ([of_a_tenant, passing_on], plain, {}),
        ([of_a_tenant, passing_on, passing_on], plain, {"autoretry_for": (OSError,)}),
        ([with_itself], bound, {"bind": True}),
        ([with_itself, passing_on], bound, {"bind": True}),
    ],
)
def test_key_of_a_decorated_body(app, decorators, body, options):
    """The key may name each parameter with which the task is called, also behind decorators that pass anything on."""
    for decorator in decorators:
        body = decorator(body)
    task = singleton_task(name="shop.sync", key=("tenant",), **options)(body)

    assert task.singleton.key(5, 7) == task.singleton.key(shop_id=8, tenant=5) == "task:shop.sync:tenant=5"


class Colour(Enum):
    RED = 1
    GREEN = 2


class TextColour(StrEnum):
    RED = "red"


class Plain(str, Enum):  # noqa: UP042 (its text is not its value)
    RED = "red"


class Rights(IntFlag, boundary=KEEP):  # which keeps bits that it has no name for
    READ = 1


EARLIER = timezone(timedelta(hours=5, minutes=30))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"\xff\x00", b"\xff\x00"),
        ("Zürich\ud800", "Zürich\ud800"),
        ({"nested": [uuid.UUID(int=7), (1, None)]}, {"nested": [uuid.UUID(int=7), (1, None)]}),
        (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 5, 30, tzinfo=EARLIER)),
        (Decimal("1.0"), Decimal("1.00")),
        (Decimal(f"1{'0' * 40}1.50"), Decimal(f"1{'0' * 40}1.5")),
        (gettext_lazy("held"), "held"),
        (TextColour.RED, "red"),
        ((1, 2), [1, 2]),
        ({1: "a", 2: "b"}, {"2": "b", "1": "a"}),
    ],
    ids=repr,
)
def test_equal_values_that_are_written_differently(name, one, other):
    """Equal values have one key, before a call is sent and after it arrived, whatever JSON makes of them."""
    assert name(one) == name(other) == name(celery_json.loads(celery_json.dumps(one)))


class Filter:
    """What matters of a pydantic model: the values, and what JSON makes of them, sets in any order."""

    def __init__(self, value: Any, dumped: Any) -> None:
        self._dumps = {"python": {"value": value}, "json": {"value": dumped}}

    def model_dump(self, mode: str = "python") -> Any:
        if mode == "python" and self._dumps[mode]["value"] is None:
            raise TypeError("unhashable type")  # as of a set of models
        return self._dumps[mode]


PAIR = frozenset("ab")
MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
ABROAD = MOMENT.astimezone(EARLIER)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Filter(PAIR, ["a", "b"]), Filter(PAIR, ["b", "a"])),
        (Filter([{"x": PAIR}], [{"x": ["a", "b"]}]), Filter([{"x": PAIR}], [{"x": ["b", "a"]}])),
        (Filter(MOMENT, "2026-01-01T00:00:00Z"), Filter(ABROAD, "2026-01-01T05:30:00+05:30")),
        (Filter(Decimal("1.0"), "1.0"), Filter(Decimal("1.00"), "1.00")),
    ],
    ids=["set", "set inside", "moment", "decimal"],
)
def test_equal_models_have_one_key(name, one, other):
    """Wherever equal values are in a pydantic model, and in whichever order a process has a set."""
    assert name(one) == name(other)


def test_model_that_json_writes_in_its_own_way_counts_as_that(name):
    """A serializer of the model says what matters; and not every model can be dumped as Python's objects."""
    day, noon = Filter(MOMENT, "2026-01-01"), Filter(MOMENT + timedelta(hours=12), "2026-01-01")

    assert name(day) == name(noon)
    assert name(Filter(Decimal("1.234"), "1.23")) == name(Filter(Decimal("1.231"), "1.23"))
    assert name(Filter(None, [{"x": 1}])) == name({"value": [{"x": 1}]})


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (MOMENT, ABROAD, "2026-01-01 00%3A00%3A00+00%3A00"),
        (Decimal("100.0"), Decimal("1E+2"), "100"),
        ((1, 2), [1, 2], "[1, 2]"),
        (Plain.RED, "red", "red"),
        ({"a", "b"}, {"b", "a"}, "{'a', 'b'}"),
    ],
    ids=["moment", "decimal", "tuple", "enum", "set"],
)
def test_template_has_one_text_for_equal_values(name, one, other, text):
    """A format of the template gets the value as it is."""
    assert name(one, options={"key": "on:{x}"}) == name(other, options={"key": "on:{x}"}) == f"task:shop.sync:on:{text}"
    assert name(ABROAD, options={"key": "on:{x:%H.%M}"}) == "task:shop.sync:on:05.30"
    texts = {name(value, options={"key": "on:{x}"}) for value in ({1, 2}, {"1", "2"}, ["1", "2"], [1, 2])}
    assert len(texts) == 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=UTC)),
        (datetime(2026, 1, 1), date(2026, 1, 1)),
        (datetime.max.replace(tzinfo=timezone(-timedelta(hours=1))), datetime.max.replace(tzinfo=UTC)),
        (Decimal(f"1{'0' * 40}1"), Decimal(f"1{'0' * 40}2")),
        (Decimal("NaN"), Decimal("Infinity")),
        (1, "1"),
        (1, 1.0),
        (1, True),
        (Colour.RED, Colour.GREEN),
        (Rights(8), Rights(16)),
        (timedelta(hours=1), timedelta(hours=2)),
        (1 + 2j, 2 + 1j),
    ],
    ids=repr,
)
def test_unequal_values_that_are_written_alike(name, one, other):
    """Moments with and without a time zone, a day and its midnight, and numbers of two types have two keys."""
    assert name(one) == name(one)
    assert name(one) != name(other)
