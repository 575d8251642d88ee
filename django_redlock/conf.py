"""
Read the ``REDLOCK`` setting: only when it is used, without changing it, and with errors that say what to write instead.

No message shows a URL, because a URL may contain a password.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote, unquote, urlsplit

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from .core.rules import Rules, may_be_url, nearest, quoted
from .nodes import Node, NodeSpec
from .nodes.backends import SCHEMES, open_node
from .nodes.base import split_url

P = ParamSpec("P")
T = TypeVar("T")
ALIAS_KEYS = ("NODES", "KEY_PREFIX", "OPTIONS")
NODE_KEYS = ("URL", "NAME", "OPTIONS", "MASTERS")
BACKEND_KEYS = ("BACKEND", "URL", "NAME", "OPTIONS")
SENTINEL_KEYS = ("SENTINELS", "SERVICE_NAME", "NAME", "OPTIONS", "MASTERS")
SENTINEL_EXAMPLE = "{'SENTINELS': [('sentinel-1', 26379), ('sentinel-2', 26379)], 'SERVICE_NAME': 'mymaster'}"
OPTION_KEYS = tuple(field.name for field in fields(Rules) if field.name != "nodes")
EXAMPLE = """\
REDLOCK = {
    "default": {
        "NODES": ["redis://lock-1:6379", "redis://lock-2:6379", "redis://lock-3:6379"],
    },
}"""
REDIS_CACHES = (
    "django.core.cache.backends.redis.RedisCache",
    "django_redis.cache.RedisCache",
    "django_valkey.cache.ValkeyCache",
    "django_valkey.async_cache.cache.AsyncValkeyCache",
)
SENTINEL_CLASSES = ("CLIENT_CLASS", "CONNECTION_FACTORY", "CONNECTION_POOL_CLASS")  # options of a cache
FACTORIES = ("DJANGO_REDIS_CONNECTION_FACTORY", "DJANGO_VALKEY_CONNECTION_FACTORY")  # settings for all caches
CACHE_CREDENTIALS = {"PASSWORD": "password", "USERNAME": "username"}


class InvalidRedlockError(ImproperlyConfigured):
    """
    The ``REDLOCK`` setting cannot be used; the message says where and what to write instead.

    Args:
        message: What is wrong, where, and what to write.
        code: The id of the check that reports it.
    """

    def __init__(self, message: str, code: str = "redlock.E001") -> None:
        super().__init__(message, code)
        self.message = message
        self.code = code

    def __str__(self) -> str:
        return self.message


class UnknownAliasError(InvalidRedlockError):
    """``REDLOCK`` has no such alias; the message names those that it has."""


@dataclass(frozen=True, slots=True)
class AliasConfig:
    """The checked settings of one alias of ``REDLOCK``."""

    alias: str
    nodes: tuple[Node, ...]
    rules: Rules


def _without_frames(read: Callable[P, T]) -> Callable[P, T]:
    """
    Raise errors about the settings without the frames in which they arose.

    The variables of these frames hold the settings, passwords included. Django's debug page and error trackers show the
    variables of every frame in a traceback. Some of them also show an error that ``from None`` hides.
    """

    @wraps(read)
    def reading(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(*args, **kwargs)
        except InvalidRedlockError as error:
            error.__context__ = None
            raise error.with_traceback(None) from None

    return reading


@_without_frames
def aliases() -> tuple[str, ...]:
    """
    Return the aliases of the ``REDLOCK`` setting.

    Raises:
        InvalidRedlockError: The setting is missing or not a dict of dicts.
    """
    return tuple(_setting())


@_without_frames
def read_alias(alias: str) -> AliasConfig:
    """
    Return the checked settings of one alias, without connecting to anything.

    Raises:
        InvalidRedlockError: The setting, the alias or something in it cannot be used.
    """
    setting = _setting()
    if alias not in setting:
        named = "no alias that is a URL." if may_be_url(alias) else f"no alias {alias!r}{nearest(alias, setting)}"
        raise UnknownAliasError(f"REDLOCK has {named} It has {', '.join(map(repr, setting))}.")
    entry = setting[alias]
    _known_keys(f"REDLOCK[{alias!r}]", entry, ALIAS_KEYS)
    prefix, where = _prefix(alias, entry), f"REDLOCK[{alias!r}]['NODES']"
    found: list[Node] = []
    for index, node in enumerate(_node_list(where, entry.get("NODES"))):
        spec = _node_spec(f"{where}[{index}]", node)
        try:
            found.append(open_node(replace(spec, alias=alias), prefix))
        except ValueError as error:
            stop = "" if str(error).endswith("?") else "."
            raise _bad_node(f"{where}[{index}] cannot be used: {error}{stop}") from None
    nodes = tuple(found)
    _distinct(alias, nodes)
    return AliasConfig(alias, nodes, _rules(alias, entry.get("OPTIONS", {}), nodes))


def databases_of(alias: str) -> list[str]:
    """Return the ``DATABASES`` aliases that a well-formed alias uses as nodes."""
    return [url.removeprefix("database://") for url in nodes_named(alias) if url.startswith("database://")]


def nodes_named(alias: str) -> list[str]:
    """Return what names each node of a well-formed alias: its URL, ``cache:`` and an alias, or nothing."""
    nodes = _node_list(alias, _setting()[alias].get("NODES"))
    return [_url(node if isinstance(node, str) else node.get("URL", "")) for node in nodes]


def is_test_run() -> bool:
    """Return whether Django's tests are running; an outbox does not show that, as Django's mail in memory has one."""
    return hasattr(getattr(sys.modules.get("django.test.utils"), "_TestState", None), "saved_data")


def _setting() -> Mapping[str, Any]:
    setting = getattr(settings, "REDLOCK", None)
    if setting is None:
        raise _with_example("The REDLOCK setting is missing.")
    if not isinstance(setting, Mapping):
        raise _with_example(f"REDLOCK must be a dict of aliases, not {type(setting).__name__}.")
    if not setting:
        raise _with_example("REDLOCK is empty.")
    for alias, entry in list(setting.items()):  # tests may add aliases in other threads
        if not isinstance(alias, str):
            named = f"the alias {quoted(alias)}, which must be a str, not {type(alias).__name__}"
            raise _with_example(f"REDLOCK has {named}.")
        if "//" in alias:  # it may have a password
            raise _with_example("REDLOCK has a URL as a key; the keys are aliases, and URLs belong in their NODES.")
        if not isinstance(entry, Mapping):
            below = f": {alias} belongs below an alias" if alias in ALIAS_KEYS else ""
            raise _with_example(f"REDLOCK[{alias!r}] must be a dict, not {type(entry).__name__}{below}.")
    return setting


def _with_example(wrong: str, code: str = "redlock.E001") -> InvalidRedlockError:
    return InvalidRedlockError(f"{wrong} Write, for example:\n\n{EXAMPLE}", code)


def _bad_node(wrong: str) -> InvalidRedlockError:
    return InvalidRedlockError(wrong, "redlock.E003")


def _bad_cache(wrong: str) -> InvalidRedlockError:
    return InvalidRedlockError(wrong, "redlock.E005")


def _known_keys(where: str, entry: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in entry:
        if key not in known:
            named = "a URL as a key" if may_be_url(key) else f"an unknown key {key!r}"
            if known == ALIAS_KEYS and key in OPTION_KEYS:
                named += ", which belongs into 'OPTIONS'"
            raise InvalidRedlockError(f"{where} has {named}. Known: {', '.join(known)}.", "redlock.E007")


def _prefix(alias: str, entry: Mapping[str, Any]) -> str:
    prefix = entry.get("KEY_PREFIX", "redlock")
    if not isinstance(prefix, str) or not re.fullmatch(r"[^{}\s]{1,100}", prefix):
        raise InvalidRedlockError(
            f"REDLOCK[{alias!r}]['KEY_PREFIX'] must be a str of 1 to 100 characters without braces and white space, "
            f"not {quoted(prefix)}; write the project's name.",
            "redlock.E009",
        )
    return f"{prefix}:"


def _node_list(where: str, nodes: Any) -> list[Any]:
    if isinstance(nodes, str):
        urls: list[str] = []
        for part in filter(None, map(str.strip, nodes.split(","))):
            if urls and "://" in urls[-1] and "://" not in part and not part.startswith("cache:"):
                urls[-1] += f",{part}"  # a host without a scheme belongs to the URL before it
            else:
                urls.append(part)
        nodes = urls
    if not isinstance(nodes, (list, tuple)) or not nodes:
        given = f", not {type(nodes).__name__}" if nodes else ""
        wrong = f"{where} must list the URLs of the nodes, or name them in one string with commas{given}."
        raise _with_example(wrong, "redlock.E003")
    return list(nodes)


def _node_spec(where: str, node: Any) -> NodeSpec:
    entry: Mapping[str, Any] = {"URL": node} if isinstance(node, str) else node
    if isinstance(entry, Mapping) and "URL" not in entry and {"SENTINELS", "SERVICE_NAME"} & entry.keys():
        return _sentinel_spec(where, entry)
    if isinstance(entry, Mapping) and "BACKEND" in entry:
        return _backend_spec(where, entry)
    url = entry["URL"] if isinstance(entry, Mapping) and "URL" in entry else entry
    if not isinstance(url, str):
        given = f"a dict with {', '.join(map(quoted, url))}" if isinstance(url, Mapping) else type(url).__name__
        raise _bad_node(f"{where} must be a URL such as 'redis://lock-1:6379', or a dict with a 'URL', not {given}.")
    _known_keys(where, entry, NODE_KEYS)
    name, url = _node_name(where, entry), _url(url)
    if url.startswith("cache:"):
        if entry.get("OPTIONS"):
            raise _bad_node(f"{where} names a cache, which takes no OPTIONS here: set them in its entry in CACHES.")
        return _cache_spec(where, url.removeprefix("cache:"), name)
    scheme = _scheme(where, url)
    if scheme not in SCHEMES:
        raise _bad_node(
            f"{where} has a URL whose scheme is not one of {', '.join(SCHEMES)}, cache; "
            "write, for example, 'redis://lock-1:6379'."
        )
    # Schemes may be written in capitals, and each kind of node compares them.
    masters = _masters(where, entry)
    if masters and not scheme.endswith("+cluster"):
        raise _bad_node(
            f"{where} has MASTERS, but its URL names the master; MASTERS is for Sentinel and for a cluster."
        )
    return NodeSpec(scheme + url[len(scheme) :], name, _node_options(where, entry), masters=masters)


def _backend_spec(where: str, entry: Mapping[str, Any]) -> NodeSpec:
    """Return the node of a class that a dotted path names; the class decides what its URL and options may be."""
    _known_keys(where, entry, BACKEND_KEYS)
    path, url = entry["BACKEND"], entry.get("URL", "")
    if not isinstance(path, str) or not re.fullmatch(r"\w+(\.\w+)+", path):
        raise _bad_node(f"{where}['BACKEND'] must be the dotted path of a class, such as 'shop.locks.FileNode'.")
    if not isinstance(url, str):
        raise _bad_node(f"{where}['URL'] must be a str, not {type(url).__name__}.")
    return NodeSpec(url, _node_name(where, entry), _node_options(where, entry), backend=path)


def _node_name(where: str, entry: Mapping[str, Any]) -> str:
    name = entry.get("NAME", "")
    if not isinstance(name, str):
        raise _bad_node(f"{where}['NAME'] must be a str, not {type(name).__name__}.")
    if "//" in name:  # it may have a password
        raise _bad_node(f"{where}['NAME'] must be a name that people recognize, such as 'lock-1', not a URL.")
    return name


def _scheme(where: str, url: str) -> str:
    try:
        return split_url(url).scheme
    except ValueError:
        raise _bad_node(
            f"{where} has a URL that cannot be read; write a URL such as 'redis://lock-1:6379', and percent-encode @, "
            "#, /, ?, [ and ] in a user name or password."
        ) from None


def _url(url: str) -> str:
    """Return the URL of a node without the white space around it, and with its scheme in small letters."""
    scheme, colon, rest = url.strip().partition(":")
    return f"{scheme.lower()}{colon}{rest}"


def _sentinel_spec(where: str, entry: Mapping[str, Any]) -> NodeSpec:
    """Return the node that is the master of a service watched by Redis Sentinel."""
    _known_keys(where, entry, SENTINEL_KEYS)
    service, sentinels = entry.get("SERVICE_NAME"), entry.get("SENTINELS")
    urls = _sentinel_urls(f"{where}['SENTINELS']", sentinels)
    if not isinstance(service, str) or not re.fullmatch(r"[\w.-]+", service) or not urls:
        raise _bad_node(
            f"{where} needs SENTINELS, a list of (host, port) or of URLs such as 'redis://sentinel-1:26379', and the "
            f"SERVICE_NAME that they know the master by; write, for example, {SENTINEL_EXAMPLE}."
        )
    options = _node_options(where, entry)
    scheme = "rediss" if any(key.startswith("ssl_") for key in options) else "redis"
    name, masters = _node_name(where, entry), _masters(where, entry)
    return NodeSpec(f"{scheme}://{service}", name, options, urls, masters)


def _node_options(where: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not in the URL: redis-py's, or those of the class that ``BACKEND`` names."""
    options = entry.get("OPTIONS", {})
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise _bad_node(
            f"{where}['OPTIONS'] must be a dict with names of options as keys, such as "
            f"{{'ssl_ca_certs': '/etc/ssl/locks.pem'}}, not {type(options).__name__}."
        )
    if any(map(may_be_url, options)):
        raise _bad_node(f"{where}['OPTIONS'] has a URL as a key; the keys are names of options, such as 'password'.")
    return dict(options)


def _masters(where: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the hosts that may be the master; none if any host may."""
    masters = entry.get("MASTERS", ())
    if not isinstance(masters, (list, tuple)) or not all(
        isinstance(host, str) and host and "//" not in host for host in masters
    ):
        raise _bad_node(
            f"{where}['MASTERS'] must be a list of hosts as the servers announce them, such as ['10.0.0.1']."
        )
    return tuple(masters)


def _sentinel_urls(where: str, entries: Any) -> tuple[str, ...]:
    """Return the URLs of sentinels; none if *entries* is no list, or one of them is neither (host, port) nor a URL."""
    urls: list[str] = []
    for entry in entries if isinstance(entries, (list, tuple)) else ():
        match entry:
            case str() if _scheme(where, _url(entry)) in ("redis", "rediss", "valkey", "valkeys"):
                urls.append(_url(entry))
            case [str(host), int(port)] if "@" in host or "/" in host:  # it may have a password
                raise _bad_node(
                    f"{where} has a host with @ or /; write ('sentinel-1', 26379), or, with a password, a URL such as "
                    "'redis://:password@sentinel-1:26379'."
                )
            case [str(host), int(port)]:
                urls.append(f"redis://[{host}]:{port}" if ":" in host else f"redis://{host}:{port}")
            case _:
                return ()
    return tuple(urls)


def _cache_spec(where: str, alias: str, name: str) -> NodeSpec:
    """Return the primary of a ``CACHES`` entry; never its replicas, which do not vote."""
    caches = settings.CACHES
    if alias not in caches and may_be_url(alias):
        raise _bad_cache(f"{where} must name a cache of CACHES after 'cache:', such as 'cache:default', not a URL.")
    if alias not in caches:
        raise _bad_cache(
            f"{where} names the cache {alias!r}, which CACHES does not have{nearest(alias, caches)} "
            f"It has {', '.join(map(repr, sorted(caches)))}."
        )
    cache = caches[alias]
    options = cache.get("OPTIONS") or {}
    backend, client = str(cache.get("BACKEND")), str(options.get("CLIENT_CLASS", ""))
    if "Cluster" in backend + client:
        raise _bad_cache(
            f"{where} names the cache {alias!r}, which is a cluster; write redis+cluster://host-1,host-2 with a few of "
            "its members instead."
        )
    if backend not in REDIS_CACHES:
        raise _bad_cache(
            f"{where} names the cache {alias!r}, whose backend is not Redis; it must be one of "
            f"{', '.join(REDIS_CACHES)}."
        )
    if "Shard" in client:
        raise _bad_cache(
            f"{where} names the cache {alias!r}, whose CLIENT_CLASS spreads keys over several servers; a node must be "
            "one master. Write its URL instead."
        )
    url = _url(next(iter(servers_of(cache)), ""))
    if _scheme(f"{where} names a cache that", url) not in SCHEMES:
        raise _bad_cache(
            f"{where} names a cache whose LOCATION does not begin with a Redis URL such as 'redis://cache-1:6379/1'."
        )
    chosen = dict(_cache_options(options))
    classes = [options.get(key) for key in SENTINEL_CLASSES] + [getattr(settings, key, "") for key in FACTORIES]
    if backend != REDIS_CACHES[0] and any("Sentinel" in str(each) for each in classes):
        return _sentinel_of_cache(f"{where} names the cache {alias!r}, whose", url, name, options, chosen)
    return NodeSpec(url, name, chosen)


def _sentinel_of_cache(
    cache: str, location: str, name: str, options: Mapping[str, Any], chosen: dict[str, Any]
) -> NodeSpec:
    """Return the node of a cache whose master sentinels know; the host of its URL is the service's name."""
    how = options.get("SENTINEL_KWARGS") or {}
    if not isinstance(how, Mapping):
        raise _bad_cache(f"{cache} SENTINEL_KWARGS must be a dict, not {type(how).__name__}.")
    urls = _sentinel_urls(f"{cache} SENTINELS", options.get("SENTINELS"))
    try:
        parts = urlsplit(location)
        service, db = parts.hostname, int(parts.path.strip("/") or 0)
    except ValueError:
        service, db = None, 0
    if not urls or not service:
        raise _bad_cache(
            f"{cache} master is found by Redis Sentinel, but whose SENTINELS are no list of (host, port), or whose "
            "LOCATION is no URL of a service such as 'redis://mymaster/0'."
        )
    access = ":".join(quote(str(how.get(key) or ""), safe="") for key in ("username", "password")) + "@"
    scheme = "rediss" if how.get("ssl") else "redis"
    guides = tuple(f"{scheme}://{access * (len(access) > 2)}{url.partition('://')[2]}" for url in urls)
    own = {key: unquote(value) for key in ("username", "password") if (value := getattr(parts, key))}
    return NodeSpec(f"{parts.scheme}://{service}", name, {"db": db} | own | chosen, guides)


def servers_of(cache: Mapping[str, Any]) -> list[str]:
    """Return the URLs in the ``LOCATION`` of a ``CACHES`` entry; none if it is neither a str nor a list."""
    location = cache.get("LOCATION")
    if isinstance(location, str):
        return re.split("[;,]", location)
    return [str(each) for each in location] if isinstance(location, (list, tuple)) else []


def _cache_options(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options that say where and as which user a cache connects, but not its pools, timeouts and retries."""
    for source in (options, options.get("CONNECTION_POOL_KWARGS") or {}):
        for key, value in source.items():
            key = CACHE_CREDENTIALS.get(key, key)
            if key in ("username", "password", "db", "credential_provider") or key.startswith("ssl_"):
                yield key, value


def _distinct(alias: str, nodes: tuple[Node, ...]) -> None:
    for field in ("address", "name"):
        seen: dict[str, int] = {}
        for index, node in enumerate(nodes):
            # Two entries with one member in common are one cluster.
            parts = set(getattr(node, "members", ()) if field == "address" else ()) or {getattr(node, field)}
            for value in sorted(parts & seen.keys()):
                what = "One server has one vote, also with another database number: list independent masters."
                if field == "name":  # of two addresses
                    what = "These are two servers: give each of them a NAME of its own."
                raise InvalidRedlockError(
                    f"REDLOCK[{alias!r}]['NODES'] has {value!r} twice, at {seen[value]} and {index}. {what}",
                    "redlock.E004",
                )
            seen |= dict.fromkeys(parts, index)


def _rules(alias: str, options: Any, nodes: tuple[Node, ...]) -> Rules:
    where = f"REDLOCK[{alias!r}]['OPTIONS']"
    if not isinstance(options, Mapping):
        raise InvalidRedlockError(f"{where} must be a dict, not {type(options).__name__}.", "redlock.E007")
    _known_keys(where, options, OPTION_KEYS)
    fields_of_names = ("durable", "allow_evicting")
    names = {each: tuple(options[each]) for each in fields_of_names if isinstance(options.get(each), (list, tuple))}
    known = [node.name for node in nodes]
    unknown = [(field, name) for field, listed in names.items() for name in listed if name not in known]
    for field, name in unknown:
        near = f"{nearest(name, known)} The nodes are {', '.join(known)}."
        raise InvalidRedlockError(f"{where}[{field!r}] names no node: {quoted(name)}{near}", "redlock.E007")
    for node in nodes:
        if node.fails_over and node.name in names.get("durable", ()):
            raise InvalidRedlockError(
                f"{where}['durable'] names {node.name!r}, whose master may be replaced by a replica that does not have "
                "the last locks: it is never durable. Take it off the list.",
                "redlock.E010",
            )
    try:
        return Rules(nodes=len(nodes), **{**options, **names})
    except ValueError as error:
        raise InvalidRedlockError(f"{where}: {error}", "redlock.E006") from None
