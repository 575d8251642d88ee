"""The base classes of celery-once and celery-singleton, over our slots."""

import json
import pickle
from types import SimpleNamespace

import pytest

from django_redlock.celery import DuplicateTask
from django_redlock.celery.migration import AlreadyQueued, DuplicateTaskError, QueueOnce, Singleton


def nothing(shop_id, since=None):
    return shop_id


def test_queue_once(app, worker):
    """``QueueOnce`` raises its own error about a duplicate, which is also ours; what celery-once has sent runs, too."""
    task = app.task(name="shop.once", base=QueueOnce, once={"keys": ["shop_id"], "timeout": 60})(nothing)
    first = task.delay(7, since=1)

    with pytest.raises(AlreadyQueued) as caught:
        task.delay(shop_id=7, since=2)

    assert isinstance(caught.value, DuplicateTask)
    assert 50 < caught.value.countdown <= 60
    assert (worker.run(), first.get(timeout=1)) == ("SUCCESS", 7)
    app.send_task("shop.once", (7,))
    assert not task.delay(7).duplicate
    assert worker.run_all() == ["IGNORED", "SUCCESS"]


def test_options_of_celery_once(app):
    """``graceful``, of the task or of a call, gives a duplicate the result of the first; misspellings are refused."""
    always = app.task(name="shop.always", base=QueueOnce, once={"graceful": True})(nothing)
    task = app.task(name="shop.once", base=QueueOnce)(nothing)
    first = task.delay(7)

    assert always.delay(7).id == always.delay(7).id
    for singleton, joins in ({}, True), ({"singleton": {"queue_ttl": 5}}, True), ({"singleton": False}, False):
        assert (task.apply_async((7,), once={"graceful": True}, **singleton).id == first.id) is joins
    with pytest.raises(TypeError, match="'graceful' and 'timeout', not 'gracefull'; did you mean 'graceful'"):
        task.apply_async((7,), once={"gracefull": True})
    for once, error, message in (
        ({"gracefull": True}, TypeError, "'gracefull'; did you mean 'graceful'"),
        ({"keys": ["shop"]}, ValueError, "'shop', which is not a parameter"),
    ):
        with pytest.raises(error, match=message):
            app.task(name="shop.wrong", base=QueueOnce, once=once, lazy=False)(nothing)


def test_settings_of_celery_once(app):
    """The app's ``ONCE`` gives the timeout of tasks that have none; a call does not block, and the error says so."""
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"default_timeout": 90}}
    task = app.task(name="shop.settings", base=QueueOnce)(nothing)
    assert task.singleton_options.queue_ttl == 90
    app.conf.ONCE = {"settings": {"blocking": True, "blocking_timeout": 5}}

    with pytest.raises(TypeError, match=r"does not wait for its slot here\. Remove blocking and blocking_timeout"):
        app.task(name="shop.blocking", base=QueueOnce)(nothing).delay(7)


@pytest.mark.parametrize("base", [QueueOnce, Singleton])
def test_subclass_sends_calls_that_are_not_unique(app, worker, base):
    """``super(QueueOnce, self).apply_async()`` was Celery's own method, and sends without a slot."""

    class Sometimes(base):
        abstract = True

        def apply_async(self, args=None, kwargs=None, **options):
            if options.pop("unique", True):
                return super().apply_async(args, kwargs, **options)
            return super(base, self).apply_async(args, kwargs, **options)

    task = app.task(name="shop.sometimes", base=Sometimes)(nothing)
    first = task.delay(7)
    others = [task.apply_async((7,), unique=False) for _ in range(2)]

    assert len({first.id, *(other.id for other in others)}) == 3
    assert task.singleton.holder(7).id == first.id
    assert worker.run_all() == ["SUCCESS"] * 3
    assert not task.singleton.is_locked(7)


HOOKS = [(QueueOnce, "get_key"), (QueueOnce, "unlock_before_run"), (Singleton, "generate_lock")]


@pytest.mark.parametrize(("base", "hook"), [*HOOKS, (Singleton, "on_duplicate")])
def test_hook_that_nothing_calls_is_refused(base, hook):
    """A subclass that overrides it is an error when the class is made, with what to write instead."""
    with pytest.raises(TypeError, match=rf"Tenant has {hook}, .* nothing calls here. .*@singleton_task\(key=...\)"):
        type("Tenant", (base,), {"abstract": True, hook: nothing})


@pytest.mark.parametrize(
    ("base", "options", "message", "option", "value"),
    [
        (QueueOnce, {"once": {"unlock_before_run": True}}, "until_and_while_executing", "scope", "until_executing"),
        (Singleton, {"lock_expiry": 5}, "a run keeps its slot to its end", "queue_ttl", 5),
    ],
)
def test_option_with_another_meaning_warns(app, base, options, message, option, value):
    """``unlock_before_run`` and ``lock_expiry`` are options here, and a warning says what they let happen."""
    with pytest.warns(UserWarning, match=message):
        app.task(name="shop.warned", base=base, lazy=False, **options)(nothing)

    assert getattr(app.tasks["shop.warned"].singleton_options, option) == value


def test_singleton(app):
    """``Singleton`` joins by default, bound or not, and raises its own error if told so."""

    def bound(self, shop_id, since=None):
        return shop_id

    joins = app.task(name="shop.joins", base=Singleton, unique_on="shop_id", bind=True)(bound)
    raises = app.task(name="shop.raises", base=Singleton, raise_on_duplicate=True)(nothing)
    first, other = joins.delay(7, since=1), raises.delay(7)

    assert joins.delay(7, since=2).id == first.id
    with pytest.raises(DuplicateTaskError) as caught:
        raises.delay(7)
    assert caught.value.task_id == other.id
    assert joins.release_lock((7,)) == "released"
    assert hasattr(joins, "delay_on_commit")  # as Celery gives tasks of Django


@pytest.mark.parametrize(
    ("base", "options"),
    [(QueueOnce, {"once": {"keys": []}}), (Singleton, {"unique_on": []}), (Singleton, {"unique_on": [""]})],
)
def test_empty_keys_make_all_calls_equal(app, base, options):
    """celery-once's ``keys: []`` and an empty ``unique_on`` of celery-singleton 0.3 mean one of the task at all."""

    @app.task(base=base, name="shop.nightly", **options)
    def nightly(shop_id):
        pass

    assert nightly.singleton.key(7) == nightly.singleton.key(8) == "task:shop.nightly"


def test_errors_are_made_as_before():
    """Code of a project that raises or copies these errors itself works as before."""
    queued, duplicate = AlreadyQueued(60), DuplicateTaskError("a duplicate", task_id="x")

    assert (queued.countdown, queued.message) == (60, "Expires in 60 seconds")
    assert (duplicate.task_id, str(duplicate)) == ("x", "a duplicate")
    for error in (queued, duplicate, AlreadyQueued.found("x", "running", 5.0, "name")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.holder_id) == (type(error), str(error), error.holder_id)
        assert (again.state, again.retry_after, again.name) == (error.state, error.retry_after, error.name)


class ShopEncoder(json.JSONEncoder):
    """Encodes shops by their number alone, as an encoder of a project does."""

    def default(self, value):
        return value.number


@pytest.mark.parametrize("encoder", [ShopEncoder, f"{__name__}.ShopEncoder"])
@pytest.mark.parametrize("unique_on", [None, "shop"])
def test_json_encoder_of_the_settings(app, encoder, unique_on):
    """``singleton_json_encoder_class`` decides what makes calls equal, as before."""
    app.conf.singleton_json_encoder_class = encoder
    shop = SimpleNamespace(number=7, loaded=1)

    @app.task(base=Singleton, name="shop.encoded", unique_on=unique_on)
    def encoded(shop): ...

    assert encoded.singleton.key(shop) == encoded.singleton.key(SimpleNamespace(number=7, loaded=2))
    assert encoded.singleton.key(shop) != encoded.singleton.key(SimpleNamespace(number=8))
