"""The ``REDLOCK`` setting: what is read, when, and the messages about mistakes in it."""

import logging
import math
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import _state
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.test import override_settings
from django.test.utils import _TestState

import django_redlock
from django_redlock import InvalidRedlockError, LockManager, lock, locks
from django_redlock.checks import check_deployment, check_settings
from django_redlock.nodes import NodeSpec
from django_redlock.nodes.memory import MemoryNode
from django_redlock.signals import lock_acquired, lock_released, lock_taken
from django_redlock.testing import Servers
from tests.services import SQLite, django_database

THREE = ["redis://lock-1:6379", "redis://lock-2:6379", "redis://lock-3:6379"]
REDIS_CACHE = "django.core.cache.backends.redis.RedisCache"
DJANGO_REDIS = "django_redis.cache.RedisCache"
DJANGO_VALKEY = "django_valkey.cache.ValkeyCache"
SECRET = "sesame"
PATIENCE = 60.0  # seconds
ROOT = Path(__file__).parents[2]


def configured(**entry: Any) -> Any:
    return override_settings(REDLOCK={"default": {"NODES": THREE, **entry}})


def shown(caplog: pytest.LogCaptureFixture) -> str:
    """Return everything that the log records hold: their texts and all their fields."""
    return caplog.text + "".join(repr(vars(record)) for record in caplog.records)


# URLs of a node that cannot be used (redlock.E003), each with a part of the message.
URLS: list[tuple[str, str]] = [
    ("lock-1:6379", "scheme is not one of redis, rediss, unix"),
    (f"redis://:{SECRET}@a:99999", "its address, port or database number"),
    (f"redis://u:{SECRET}@a?tls=1", "no option 'tls'"),
    (f"redis://:pa/{SECRET}@lock-1:6379", "percent-encoded"),
    (f"redis://:pa@{SECRET}@lock-1:6379", "percent-encoded"),
    (f"redis://:12#{SECRET}@lock-1", "percent-encoded"),
    (f"redis://:12?{SECRET}@lock-1", "percent-encoded"),
    (f"unix://:{SECRET}/run/valkey.sock", "percent-encoded"),
    ("redis://lock-1:0", "its port cannot be 0"),
    ("redis:/lock-1", "lacks the two slashes"),
    (f"redis://:{SECRET}@a:6379redis://b:6379", "it names several nodes"),
    (f"redis://:{SECRET}[@a", "cannot be read; .* percent-encode"),
    ("redis://lock-1/abc", "database number"),
    ("unix://", "needs the path of a socket"),
    (f"memory://:{SECRET}@a", "needs a name, such as memory://a"),
    (f"database://u:{SECRET}@db/shop", "names an alias of DATABASES"),
    ("database://nowhere", "DATABASES has no alias 'nowhere', it has 'default'"),
    ("database://default?timeout=1", "only the name of an alias"),
    (f"redis+cluster://:{SECRET}@a,b/2", "a cluster has the database 0 only"),
    (f"redis://:{SECRET}@a,b", r"redis\+cluster://host-1,host-2"),
    (f"redis+cluster://:{SECRET}@a,,b", "without a host: write, for example"),
    ("redis+cluster://a?ssl_ca_certs=/x", "write rediss instead of redis"),
    ("redis://a?connection_class=x", "connection_class cannot be set; the scheme says it"),
    ("cache:unreadable", "names a cache that has a URL that cannot be read"),
]

SENTINELS = {"SENTINELS": [("s1", 26379), ("::1", 26379), f"redis://:{SECRET}@s2:26379"], "SERVICE_NAME": "mymaster"}

# Options of redis-py's connections that have no effect here.
UNUSED = {
    **{"socket_timeout": 5, "socket_connect_timeout": 5, "retry_on_timeout": True, "retry_on_error": [OSError]},
    **{"retry": None, "health_check_interval": 30, "protocol": 3, "decode_responses": True, "socket_read_size": 9},
    **{"redis_connect_func": print},
}

OURS = "tests.unit.test_settings.Kept"

# Entries with BACKEND that cannot be used.
BACKENDS: list[tuple[Any, str, str]] = [
    ([{"BACKEND": backend, "URL": f"x://:{SECRET}@a", "OPTIONS": {"password": SECRET}}], "redlock.E003", message)
    for backend, message in (
        (7, r"\[0\]\['BACKEND'\] must be the dotted path of a class, such as 'shop.locks.FileNode'\.$"),
        ("FileNode", "must be the dotted path of a class"),
        (f"redis://:{SECRET}@a", "must be the dotted path of a class"),
        (
            "shop.lock.FileNode",
            r"\[0\] cannot be used: its BACKEND names the module 'shop.lock', which cannot be",
        ),
        (
            f"{OURS}s",
            r"names 'Kepts', which the module 'tests.unit.test_settings' does not have; did .* 'Kept'\?$",
        ),
        (REDIS_CACHE, "names RedisCache, which is no node: it has no connect, aconnect, listen, alisten. Write"),
        ("tests.unit.test_settings.no_node", "names no_node, which is no node: it has no connect"),
        ("tests.unit.test_settings.broken", r"broken raised KeyError in .*test_settings.py, line \d+; it takes a Node"),
        ("tests.unit.test_settings.refusing", r"\[0\] cannot be used: it takes no password\.$"),
        (
            "django_redlock.nodes.memory.MemoryNode",
            "MemoryNode has no str as its name and address: it must take a NodeS",
        ),
        ("tests.unit.test_settings.talkative", "talkative has a URL as its name or address, which pages show"),
    )
]
BACKENDS += [
    ([{"BACKEND": OURS, "LOCATION": "/srv"}], "redlock.E007", "unknown key 'LOCATION'. Known: BACKEND"),
    (
        [{"BACKEND": OURS, "MASTERS": ["a"]}],
        "redlock.E007",
        "unknown key 'MASTERS'. Known: BACKEND, URL, NAME, OPT",
    ),
    ([{"BACKEND": OURS, "URL": Path("/srv")}], "redlock.E003", r"\['URL'\] must be a str, not PosixPath"),
    ([{"BACKEND": OURS, "OPTIONS": [SECRET]}], "redlock.E003", r"\['OPTIONS'\] must be a dict with names of options"),
    ([{"BACKEND": OURS, "NAME": f"x://:{SECRET}@a"}], "redlock.E003", "such as 'lock-1', not a URL"),
    ([{"BACKEND": OURS, "URL": "x://a"}] * 2, "redlock.E004", "'kept:x' twice, at 0 and 1"),
]


class Kept(MemoryNode):
    """A kind of node that keeps what it was made of."""

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        super().__init__(spec.name or "x")
        self.address = "kept:x"
        self.made_of = spec, prefix


def no_node(spec: NodeSpec, prefix: str) -> object:
    return object()


def broken(spec: NodeSpec, prefix: str) -> Any:
    return {SECRET: 1}[spec.url]


def refusing(spec: NodeSpec, prefix: str) -> Any:
    raise ValueError("it takes no password")


def talkative(spec: NodeSpec, prefix: str) -> Any:
    return MemoryNode(spec.url)


# Other values of NODES that cannot be used, each with the id of its check and a part of the message.
NODES: list[tuple[Any, str, str]] = [
    ([], "redlock.E003", r"\['NODES'\] must list the URLs"),
    (["redis-cluster://a"], "redlock.E003", r"scheme is not one of .* redis\+cluster,.*; write, for example"),
    ([f"redis+socket://:{SECRET}@/run/redis.sock?virtual_host=2"], "redlock.E003", "scheme is not one of .* unix, "),
    ([{"URL": "redis://a", "OPTIONS": {"pasword": 1}}], "redlock.E003", r"'pasword'(\.|; did you mean 'password'\?)$"),
    ([{"URL": "redis://a", "OPTIONS": {"db": SECRET}}], "redlock.E003", "its option db is not a number"),
    ([{"URL": "redis://a", "OPTIONS": {"port": SECRET}}], "redlock.E003", r"refuses its options \(ValueError\)"),
    ([{"URL": "redis://a", "OPTIONS": {"retry_on_error": 3}}], "redlock.E003", r"refuses its options \(TypeError\)"),
    *(
        ([{**node, "OPTIONS": {option: value}}], "redlock.E003", f"its OPTIONS set {option}, which locks do not use")
        for node in ({"URL": "redis://a"}, {"URL": "unix:///a"}, {"URL": "redis+cluster://a"}, SENTINELS)
        for option, value in UNUSED.items()
    ),
    ([{"URL": "memory://a", "OPTIONS": {"db": 1}}], "redlock.E003", "a node in memory takes no OPTIONS"),
    *BACKENDS,
    ([7], "redlock.E003", r"\['NODES'\]\[0\] must be a URL such as 'redis://lock-1:6379'"),
    ([{"HOST": "a", "PORT": 6379}], "redlock.E003", "not a dict with 'HOST', 'PORT'"),
    ([{"NAME": "a", f"redis://:{SECRET}@a": {}}], "redlock.E003", "not a dict with 'NAME', a URL"),
    ([{f":{SECRET}@a": 6379}], "redlock.E003", "not a dict with a URL"),
    ([{"URL": "redis://a", f":{SECRET}@a": 6379}], "redlock.E007", "has a URL as a key"),
    ([{"URL": "redis://a", "OPTIONS": {f":{SECRET}@a": 6379}}], "redlock.E003", r"\['OPTIONS'\] has a URL as a key"),
    *(
        ([{"URL": url, "OPTIONS": {option: value}}], "redlock.E003", f"its option {option} is {wrong}")
        for url, option, value, wrong in (
            ("redis://", "host", f"redis://:{SECRET}@a", "no host: write, for example, 'lock-1'"),
            ("redis://", "host", f":{SECRET}@a", "no host: write, for example, 'lock-1'"),
            ("redis+cluster://a", "host", f"{SECRET}/2", "no host: write, for example, 'lock-1'"),
            ("unix:///a", "path", f"unix://:{SECRET}@/a", "no path: write, for example, '/run/valkey.sock'"),
            ("redis://a", "db", float("inf"), "not a number"),
        )
    ),
    *(
        ([SENTINELS | {"SENTINELS": [(host, 26379)]}], "redlock.E003", r"\['SENTINELS'\] has a host with @ or /; write")
        for host in (f"redis://:{SECRET}@a", f"u:{SECRET}@10.0.0.1", f":{SECRET}@a", f"{SECRET}/2")
    ),
    ([SENTINELS | {"SENTINELS": [(f"a {SECRET}:c", 26379)]}], "redlock.E003", "its address, .* cannot be read"),
    ([{"URL": "redis://a", "NAME": 5}], "redlock.E003", r"\['NAME'\] must be a str, not int"),
    ([{"URL": "redis://a", "NAME": f"redis://:{SECRET}@a"}], "redlock.E003", "such as 'lock-1', not a URL"),
    ([SENTINELS | {"MASTERS": [f"redis://:{SECRET}@a"]}], "redlock.E003", r"must be a list of hosts .*'10\.0\.0\.1'"),
    ([{"URL": "redis://a", "OPTIONS": 5}], "redlock.E003", r"\[0\]\['OPTIONS'\] must be a dict"),
    ([{"URL": "cache:sessions", "OPTIONS": {"db": 1}}], "redlock.E003", "names a cache, which takes no OPTIONS"),
    ([{"URL": "database://default", "OPTIONS": {"db": 1}}], "redlock.E003", "a database takes no OPTIONS"),
    (["redis://a", f"redis://:{SECRET}@a:6379/1"], "redlock.E004", "'a:6379' twice, at 0 and 1"),
    (["redis+cluster://a,b", "redis+cluster://b"], "redlock.E004", "'b:6379' twice, at 0 and 1"),
    (["cache:sesions"], "redlock.E005", "which CACHES does not have; did you mean 'sessions'"),
    ([f"cache:redis://:{SECRET}@a"], "redlock.E005", "such as 'cache:default', not a URL"),
    ([f"cache::{SECRET}@a"], "redlock.E005", "such as 'cache:default', not a URL"),
    (["cache:default"], "redlock.E005", "whose backend is not Redis"),
    (["cache:sharded"], "redlock.E005", "CLIENT_CLASS spreads keys over several servers"),
    (["cache:clustered"], "redlock.E005", r"is a cluster; write redis\+cluster://host-1,host-2"),
    (["cache:unkept"], "redlock.E005", "whose SENTINEL_KWARGS must be a dict, not str"),
    (["cache:unwatched"], "redlock.E005", "found by Redis Sentinel, but whose SENTINELS are no list"),
    (["cache:nowhere"], "redlock.E005", "LOCATION does not begin with a Redis URL"),
    ([SENTINELS | {"SERVICE_NAME": ""}], "redlock.E003", r"needs SENTINELS, a list of .* for example, {'SENTINELS': "),
    ([SENTINELS | {"SENTINELS": [("s1", "26379")]}], "redlock.E003", "needs SENTINELS"),
    ([SENTINELS | {"SENTINELS": [f"redis://:{SECRET}[@s1"]}], "redlock.E003", "cannot be read; .* percent-encode"),
    ([SENTINELS | {"SERVICE": "mymaster"}], "redlock.E007", "unknown key 'SERVICE'. Known: .*SERVICE_NAME"),
]

WITHOUT_URLS = ("quorum", "ttl", "wait", "renew", "max_extensions", "restart_guard", "in_transaction", "release")

# Other keys beside three good nodes.
ENTRIES: list[tuple[Any, str, str]] = [
    ({"KEY_PREFIX": "a{b"}, "redlock.E009", "without braces and white space"),
    ({"KEY_PREFIX": f"redis://:{SECRET}@{{a}}"}, "redlock.E009", "not a URL"),
    ({"OPTIONS": {"ttl": 0}}, "redlock.E006", "ttl must be more than 0"),
    ({"OPTIONS": {"quorum": 1}}, "redlock.E006", "quorum must be a whole number from 2"),
    ({"OPTIONS": {"quorum": 4}}, "redlock.E006", "to 3, not 4"),
    ({"OPTIONS": {"node_timeout": 0}}, "redlock.E006", "node_timeout must be more than 0"),
    ({"OPTIONS": {"max_ttl": math.inf}}, "redlock.E006", "max_ttl must be a finite number"),
    ({"OPTIONS": {"drift_factor": 0.9}}, "redlock.E006", "drift_factor must be at least 0 and below 0.5"),
    (
        {"OPTIONS": {"drift_factor": 0.49}},
        "redlock.E006",
        r"Raise ttl, or lower OPTIONS\['node_timeout'\] or OPTIONS\['d",
    ),
    ({"OPTIONS": {"renew": "yes"}}, "redlock.E006", "renew must be True or False"),
    ({"OPTIONS": {"max_extensions": -1}}, "redlock.E006", "max_extensions must be"),
    ({"OPTIONS": {"max_hold": -5}}, "redlock.E006", "max_hold must be more than 0"),
    ({"OPTIONS": {"restart_guard": "off"}}, "redlock.E006", "restart_guard must be"),
    ({"OPTIONS": {"durable": "a"}}, "redlock.E006", "durable must be a list"),
    ({"OPTIONS": {"allow_evicting": f"redis://:{SECRET}@a"}}, "redlock.E006", "nodes, not a URL"),
    *(({"OPTIONS": {option: f"redis://:{SECRET}@a"}}, "redlock.E006", "not a URL") for option in WITHOUT_URLS),
    ({"OPTIONS": {"clock_guard": 0}}, "redlock.E006", "clock_guard must be True, False or None, not 0"),
    ({"OPTIONS": {"TTL": 3}}, "redlock.E007", "unknown key 'TTL'. Known: .*, ttl, "),
    ({"OPTIONS": []}, "redlock.E007", "OPTIONS'] must be a dict"),
    ({"OPTIONS": {"durable": [f"redis://:{SECRET}@a"]}}, "redlock.E007", "no node: a URL"),
    ({"OPTIONS": {"durable": [["a"]]}}, "redlock.E007", r"names no node: \['a'\]"),
    ({f"redis://:{SECRET}@a": THREE}, "redlock.E007", "has a URL as a key. Known: NODES"),
    ({"OPTIONS": {f"redis://:{SECRET}@a": 3}}, "redlock.E007", "has a URL as a key. Known: "),
    ({"ttl": 3}, "redlock.E007", "unknown key 'ttl', which belongs into 'OPTIONS'. Known"),
    ({"LOCATION": "redis://a"}, "redlock.E007", "unknown key 'LOCATION'. Known: NODES"),
    ({"OPTIONS": {"timeout": 3}}, "redlock.E007", "unknown key 'timeout'. Known: "),
]

MISTAKES: list[tuple[Any, str, str]] = [
    (None, "redlock.E001", "The REDLOCK setting is missing"),
    ({}, "redlock.E001", "REDLOCK is empty"),
    ([], "redlock.E001", "REDLOCK must be a dict of aliases, not list"),
    ({"default": []}, "redlock.E001", r"REDLOCK\['default'\] must be a dict, not list"),
    ({"NODES": THREE}, "redlock.E001", r"REDLOCK\['NODES'\] must be a dict, not list: NODES belongs below an alias"),
    (
        {f":{SECRET}@a".encode(): {"NODES": THREE}},
        "redlock.E001",
        "has the alias a URL, which must be a str, not bytes",
    ),
    ({1: {"NODES": THREE}}, "redlock.E001", "REDLOCK has the alias 1, which must be a str, not int"),
    ({f"redis://:{SECRET}@a": {"NODES": THREE}}, "redlock.E001", "has a URL as a key; the keys are aliases"),
    ({f"redis://:{SECRET}@a": []}, "redlock.E001", "has a URL as a key; the keys are aliases"),
    ({"default": {}}, "redlock.E003", r"REDLOCK\['default'\]\['NODES'\] must list the URLs"),
    ({"defalt": {"NODES": THREE}}, "", "no alias 'default'; did you mean 'defalt'?"),
    *(({"default": {"NODES": [url]}}, "redlock.E003", message) for url, message in URLS),
    *(({"default": {"NODES": nodes}}, code, message) for nodes, code, message in NODES),
    *(({"default": {"NODES": THREE, **entry}}, code, message) for entry, code, message in ENTRIES),
]

CACHES = {
    "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    "sessions": {"BACKEND": REDIS_CACHE, "LOCATION": "redis://cache-1:6379/1"},
    "sharded": {
        "BACKEND": DJANGO_REDIS,
        "LOCATION": "redis://a",
        "OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"},
    },
    "clustered": {"BACKEND": "django_valkey.cluster_cache.cache.ClusterValkeyCache", "LOCATION": "valkey://a"},
    "unkept": {
        "BACKEND": DJANGO_REDIS,
        "LOCATION": "redis://mymaster",
        "OPTIONS": {"CLIENT_CLASS": "django_redis.client.SentinelClient", "SENTINEL_KWARGS": SECRET},
    },
    "unwatched": {
        "BACKEND": DJANGO_REDIS,
        "LOCATION": f"redis://:{SECRET}@mymaster",
        "OPTIONS": {"CLIENT_CLASS": "django_redis.client.SentinelClient"},
    },
    "herd": {
        "BACKEND": DJANGO_REDIS,
        "LOCATION": "redis://cache-1:6379/1",
        "OPTIONS": {"CLIENT_CLASS": "django_redis.client.HerdClient"},
    },
    "valkey": {"BACKEND": DJANGO_VALKEY, "LOCATION": "valkey://cache-1:6379/1"},
    "pooled": {"BACKEND": REDIS_CACHE, "LOCATION": "redis://cache-1:6379/1?max_connections=9&timeout=1&protocol=3"},
    "nowhere": {"BACKEND": REDIS_CACHE, "LOCATION": "cache-1:6379"},
    "unreadable": {"BACKEND": REDIS_CACHE, "LOCATION": f"redis://:{SECRET}[@cache-1:6379"},
    "replicated": {"BACKEND": REDIS_CACHE, "LOCATION": ["redis://cache-1:6379/1", "redis://cache-2:6379/1"]},
}


@pytest.mark.parametrize(("setting", "code", "message"), MISTAKES, ids=lambda value: str(value)[:60])
def test_mistake_says_what_where_and_what_to_write(
    setting: Any, code: str, message: str, caplog: pytest.LogCaptureFixture
):
    """Using the alias and the system check report the same mistake; no message or log record shows a password."""
    caplog.set_level(logging.DEBUG)
    with override_settings(REDLOCK=setting, CACHES=CACHES, DEBUG=True):
        with pytest.raises(InvalidRedlockError, match=message) as caught:
            locks["default"]
        reported = check_settings()

    assert isinstance(caught.value, ImproperlyConfigured)
    assert caught.value.__context__ is None  # its frames would hold the settings
    if code:
        assert [each.id for each in reported] == [code]
    assert SECRET not in str(caught.value) + repr(caught.value) + str(reported) + shown(caplog)


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("redis://a, redis://b:1 ,valkey://c", ["a:6379", "b:1", "c:6379"]),
        (["rediss+cluster://u:p%2Cw@[::1]:7000,b"], ["[::1]:7000"]),
        ([" redis://a ", "REDIS://b", {"URL": "redis://c\n"}], ["a:6379", "b:6379", "c:6379"]),
        (["rediss://u:p%2Cw@a", "valkeys://b", "unix:///run/s.sock?db=2"], ["a:6379", "b:6379", "/run/s.sock"]),
        ([{"URL": "redis://a", "NAME": "north", "OPTIONS": {"username": "u"}}], ["north"]),
        ([{"SENTINELS": ["REDIS://s1", " redis://s2:1\n"], "SERVICE_NAME": "mymaster"}], ["mymaster"]),
        *((f"cache:{alias}", ["cache-1:6379"]) for alias in ("sessions", "replicated", "herd", "valkey", "pooled")),
    ],
    ids=str,
)
def test_every_form_of_nodes_is_read(nodes: Any, names: list[str]):
    """URLs in a list or in one string with commas, dicts, and cache aliases; only the primary of a cache votes."""
    with override_settings(REDLOCK={"default": {"NODES": nodes}}, CACHES=CACHES):
        assert [node.name for node in locks["default"].nodes] == names


def test_class_of_the_project_is_a_node():
    """It gets the entry and the prefix of the keys; neither the node nor what it was made of shows a password."""
    entry = {"BACKEND": OURS, "URL": f"kept://:{SECRET}@A", "NAME": "shelf", "OPTIONS": {"password": SECRET}}
    with configured(NODES=[entry], KEY_PREFIX="shop"):
        (node,) = locks["default"].nodes
        assert [message.id for message in check_settings()] == ["redlock.W001"]
        with lock("a", wait=0) as lease:
            assert lease.valid()

    assert isinstance(node, Kept)
    spec, prefix = node.made_of
    assert (spec.url, spec.name, spec.options) == (entry["URL"], "shelf", entry["OPTIONS"])
    assert (spec.alias, spec.backend, prefix) == ("default", OURS, "shop:")
    assert SECRET not in repr(node) + repr(spec)


@pytest.mark.parametrize("backend", [REDIS_CACHE, DJANGO_REDIS])
def test_cache_is_used_with_its_credentials_but_not_its_pool(nodes: Servers, backend: str):
    """A cache alias gives address, database and password; timeouts and retries stay ours."""
    with nodes[0].client() as client:
        client.config_set("requirepass", SECRET)
    options = {"db": 3, "password": SECRET} if backend == REDIS_CACHE else {"PASSWORD": SECRET}
    location = f"redis://127.0.0.1:{nodes[0].port}/3"
    caches = {"default": {"BACKEND": backend, "LOCATION": location, "OPTIONS": options}}
    try:
        with override_settings(REDLOCK={"default": {"NODES": ["cache:default"]}}, CACHES=caches):
            with lock("a", wait=0) as lease:
                assert lease.valid()
                with redis.Redis(port=nodes[0].port, db=3, password=SECRET) as client:
                    assert client.exists("redlock:{a}:h")
            assert SECRET not in repr(locks["default"])
            locks.reset()
    finally:
        with nodes[0].client(password=SECRET) as client:
            client.config_set("requirepass", "")


@pytest.mark.parametrize(
    ("backend", "options", "setting"),
    [
        (DJANGO_REDIS, {"CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory"}, {}),
        (DJANGO_REDIS, {}, {"DJANGO_REDIS_CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory"}),
        (DJANGO_VALKEY, {"CLIENT_CLASS": "django_valkey.client.SentinelClient"}, {}),
    ],
)
def test_cache_that_sentinels_look_after_is_such_a_node(backend: str, options: Any, setting: Any):
    """The host of its LOCATION is the service's name, not a server; credentials of both kinds are kept apart."""
    sentinels = {"SENTINELS": [("s1", 26379), ("s2", 26380)], "SENTINEL_KWARGS": {"password": f"{SECRET}@2"}}
    location = f"redis://:{SECRET}@mymaster/3?is_master=1"
    cache = {"BACKEND": backend, "LOCATION": location, "OPTIONS": sentinels | options}
    with configured(NODES=["cache:default"]), override_settings(CACHES={"default": cache}, **setting):
        (node,) = locks["default"].nodes
        shown = f"{node!r} {node.name} {node.address} {check_settings()}"
        assert {message.id for message in check_settings()} == {"redlock.W004", "redlock.W012"}
    assert (node.name, node.address) == ("mymaster", "mymaster of s1:26379, s2:26380")
    assert node.fails_over
    assert SECRET not in shown


def test_settings_are_read_late_and_anew_after_a_change():
    """``override_settings`` works, also for a decorator that was created when its module was imported."""
    before, described = locks["default"], lock("a")
    with override_settings(REDLOCK={"default": {"NODES": "memory://x", "OPTIONS": {"ttl": 11}}}):
        with described as lease:
            assert lease.ttl == 11
            assert locks["default"].lock("a").try_acquire() is None
        with pytest.raises(InvalidRedlockError, match=r"no alias 'other'\. It has 'default'"):
            locks["other"]
        with pytest.raises(InvalidRedlockError, match=r"no alias that is a URL\. It has 'default'") as caught:
            locks[f"redis://:{SECRET}@a"]
        with pytest.raises(InvalidRedlockError, match="An alias of REDLOCK is a str, not list"):
            lock("a", using=["default"]).acquire()
    assert SECRET not in str(caught.value)
    assert locks["default"] is not before
    assert locks["default"] is locks["default"]
    assert [manager.alias for manager in locks.all()] == ["default"]


def test_nothing_connects_before_the_first_lock(monkeypatch: pytest.MonkeyPatch):
    """No connection at import, at check time, or when a lock is described."""

    def refuse(*args: object) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(_state, "default_app", None)  # the tasks of other tests need other settings
    monkeypatch.setattr(_state._tls, "current_app", None)
    with configured():
        call_command("check")
        assert isinstance(lock("a").description().manager, LockManager)


@pytest.mark.server
def test_import_brings_neither_celery_nor_a_configured_project():
    """The lock can be imported before settings exist, and imports no redis-py; Celery not even the checks import."""
    script = (
        "import sys\nfrom django_redlock import lock\n"
        "assert not {'celery', 'django_redis', 'redis'} & set(sys.modules), sorted(sys.modules)\n"
        "import django\nfrom django.conf import settings\nfrom django.core.management import call_command\n"
        "nodes = ['redis://a', 'redis://b', 'redis://c']\n"
        "settings.configure(INSTALLED_APPS=['django_redlock'], REDLOCK={'default': {'NODES': nodes}})\n"
        "django.setup()\ncall_command('check')\nassert 'celery' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("nodes", "codes"),
    [
        (THREE[:1], ["W001"]),
        (THREE[:2], ["W001"]),
        ([*THREE, "redis://lock-4"], ["W002"]),
        (["cache:sessions", *THREE[:2]], ["W005"]),
        (["cache:replicated", *THREE[:2]], ["W005", "W003"]),
        (["database://default", *THREE[:2]], ["W010"]),
    ],
)
def test_surprise_is_a_warning_with_a_notification(nodes: list[str], codes: list[str]):
    """One id, one cause: few nodes, an even number of them, a cache as a node, whose replicas do not vote."""
    with override_settings(REDLOCK={"default": {"NODES": nodes}}, CACHES=CACHES):
        found = check_settings()
    assert [message.id for message in found] == [f"redlock.{code}" for code in codes]
    assert all(message.level == checks.WARNING and message.hint for message in found)


def test_one_database_is_no_warning_of_few_nodes(tmp_path: Path):
    """Without its database a project does not work anyway, and a database forgets nothing."""
    server = SQLite(tmp_path)
    with server.database() as name, django_database("shelf", server.settings(name)):
        with configured(NODES=["database://shelf"]):
            assert check_settings() == []
        with configured(NODES=["database://shelf", "redis://a"]):
            assert [message.id for message in check_settings()] == ["redlock.W001"]


def test_nodes_in_memory_are_an_error_outside_debug_and_tests(monkeypatch):
    """Nodes in memory protect only one process; Django's test runner switches DEBUG off."""
    with override_settings(REDLOCK={"default": {"NODES": "memory://a,memory://b,memory://c"}}, DEBUG=False):
        assert check_settings() == []
        monkeypatch.delattr(_TestState, "saved_data")
        assert [message.id for message in check_settings()] == ["redlock.E008"]
        with override_settings(DEBUG=True):
            assert check_settings() == []


def test_signals_report_every_lock(caplog: pytest.LogCaptureFixture):
    """Receivers learn who took, released or did not get a lock; one that fails affects nobody, and is logged once."""
    heard: list[str] = []

    def hear(sender: LockManager, signal: Any, **about: Any) -> None:
        heard.append(f"{sender.alias} {next(iter(about))}")
        raise RuntimeError("receiver")

    for signal in (lock_acquired, lock_released, lock_taken):
        signal.connect(hear)
    try:
        with override_settings(REDLOCK={"default": {"NODES": "memory://s"}}):
            with lock("a"), pytest.raises(django_redlock.LockTakenError):
                lock("a", wait=0).acquire()
    finally:
        for signal in (lock_acquired, lock_released, lock_taken):
            signal.disconnect(hear)

    assert heard == ["default lease", "default name", "default lease"]
    assert [record.exc_info is not None for record in caplog.records] == [True] * 3  # by Django; ours would repeat them


CLUSTER = {"URL": f"redis+cluster://u:{SECRET}@b:7001,a:7000", "NAME": "cluster"}
OTHER = {**SENTINELS, "SERVICE_NAME": "b", "NAME": "other"}


@pytest.mark.parametrize(
    ("node", "name", "address"),
    [
        (SENTINELS, "mymaster", "mymaster of [::1]:26379, s1:26379, s2:26379"),
        (OTHER, "other", "b of [::1]:26379, s1:26379, s2:26379"),
        (CLUSTER, "cluster", "a:7000, b:7001"),
    ],
)
def test_node_that_fails_over_is_a_warning_and_never_durable(node: dict[str, Any], name: str, address: str):
    """A failover can lose a vote, and with fewer than three nodes no other node decides; no URL is shown."""
    with configured(NODES=[{**node, "OPTIONS": {"password": SECRET}}, *THREE[:2]]):
        (warned,) = check_settings()
        assert (warned.id, "the others decide" in warned.hint) == ("redlock.W004", True)
        shown = locks["default"].nodes[0]
        assert (shown.name, shown.address) == (name, address)
        assert SECRET not in repr(shown)
    with configured(NODES=[node, *THREE[1:]], OPTIONS={"durable": [name]}):
        (found,) = check_settings()
    assert (found.id, "it is never durable" in found.msg) == ("redlock.E010", True)
    with configured(NODES=[node]):
        (alone,) = [message for message in check_settings() if message.id == "redlock.W004"]
    assert "OPTIONS['restart_guard'] = True" in alone.hint


ON_LOCK_1 = {"BACKEND": REDIS_CACHE, "LOCATION": "redis://lock-1/1"}


@pytest.mark.parametrize(
    ("uses", "codes"),
    [
        ({"CACHES": {"default": {"BACKEND": DJANGO_REDIS, "LOCATION": ["redis://lock-2", "redis://x"]}}}, ["W005"]),
        ({"CACHES": {"default": ON_LOCK_1, "b": ON_LOCK_1}}, ["W005"]),
        ({"BROKER_URL": f"redis://:{SECRET}@lock-3", "CELERY_BROKER_URL": "redis://lock-3/5"}, ["W006"]),
        ({"CACHES": {"default": {"BACKEND": REDIS_CACHE, "LOCATION": "redis://cache:6379"}}}, []),
        ({"CACHES": {"default": {"BACKEND": REDIS_CACHE, "LOCATION": None}}}, []),
        ({"CELERY_BROKER_URL": "redis://[lock-1"}, []),
    ],
)
def test_server_that_something_else_uses_is_a_warning(uses: dict[str, Any], codes: list[str]):
    """Caches, or both settings of the broker, on the server of a node are one warning, whatever the database number."""
    with configured(), override_settings(**uses):
        found = check_settings()
    assert [message.id for message in found] == [f"redlock.{code}" for code in codes]
    assert SECRET not in str(found)


@pytest.mark.parametrize("node", ["redis://all-in-one:6379", "cache:sessions"])
def test_one_server_for_everything_is_one_warning(node: str):
    """Cache, broker and locks on one server: one warning says it all, instead of one for each use."""
    caches = {
        "default": {"BACKEND": DJANGO_REDIS, "LOCATION": "redis://all-in-one/1"},
        "sessions": {"BACKEND": REDIS_CACHE, "LOCATION": "redis://all-in-one/2"},
    }
    broker = f"redis://:{SECRET}@all-in-one/3"
    with configured(NODES=node), override_settings(CACHES=caches, CELERY_BROKER_URL=broker):
        (found,) = check_settings()
    assert found.id == "redlock.W012"
    assert "the cache 'default' and the cache 'sessions' and Celery's broker (CELERY_BROKER_URL): no lock" in found.msg
    assert SECRET not in found.msg


MUTUAL = {"password": "x", "ssl_certfile": "/x"}


@pytest.mark.parametrize(
    ("nodes", "codes"),
    [
        (["redis://:x@a", "rediss://:x@b", "rediss://:x@c"], ["W101"]),
        (["rediss://:x@a?ssl_cert_reqs=none", "rediss://:x@b?ssl_check_hostname=False", "rediss://:x@c"], ["W106"] * 2),
        ([{"URL": "rediss://:x@a", "OPTIONS": {"ssl_cert_reqs": None}}, "rediss://:x@b", "rediss://:x@c"], ["W106"]),
        ([{"SENTINELS": ["rediss://s?ssl_cert_reqs=none"], "SERVICE_NAME": "m", "OPTIONS": MUTUAL}], ["W106"]),
        (["rediss://:x@a:1", "rediss://:x@a:2", "rediss://:x@a:3"], ["W103"]),
        (["redis://127.0.0.1:1", "redis://127.0.0.1:2", "unix:///s"], []),
        ([], []),
    ],
)
def test_deployment(nodes: list[str], codes: list[str]):
    """Without TLS, unverified, without a password, all on one host: only ``check --deploy`` warns."""
    with override_settings(REDLOCK=None):
        assert check_deployment() == []  # another check reports it
    with configured(NODES=nodes, OPTIONS={"wait": 10}):
        assert [message.id for message in check_deployment()] == [f"redlock.{code}" for code in codes]
        assert not {message.id for message in check_settings()} & {f"redlock.W10{number}" for number in range(1, 7)}


def test_checks_of_a_deployment_are_run():
    with configured(OPTIONS={"wait": None}):
        messages = checks.run_checks(tags=["redlock"], include_deployment_checks=True, databases=["default"])
    # The check of tasks sees tasks that other tests have left in this process.
    assert [each.id for each in messages if each.id > "redlock.W1"] == ["redlock.W101", "redlock.W102"] * 3


def test_every_check_is_documented_and_tested():
    """Each id in the source is in a table of the documentation and in a test; none is used for two things."""
    package = Path(django_redlock.__file__).parent
    sources = {path: set(re.findall(r"redlock\.([EW]\d+)", path.read_text())) for path in package.rglob("*.py")}
    used = set().union(*sources.values())
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    documented = set(re.findall(r"^\| `redlock\.([EW]\d+)` \|", pages, re.MULTILINE))
    here = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))

    assert used == documented
    assert [code for code in used if sum(code in codes for codes in sources.values()) > 1] == []
    assert [code for code in used if code not in here] == []
