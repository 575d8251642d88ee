"""
Comparable libraries, each used as its own documentation says, and ours in the same shape.

A *taker* waits for a lock and returns a function that releases it. Clients and their connections are made once; lock
objects are made for each use, as in a request or a task. A library that is not installed, or does not work with this
Python or redis-py, is left out by name.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module

import redis

from .bench import TTL, manager_of, ours

Taker = Callable[[str], Callable[[], object]]
AsyncTaker = Callable[[str], Awaitable[Callable[[], Awaitable[object]]]]

SENDS = "django_redlock, release sent"
LONG = 600.0  # seconds: the longest wait of a waiter


def django_redlock(urls: list[str]) -> Taker:
    manager = manager_of(urls)

    def take(name: str) -> Callable[[], object]:
        return manager.lock(name, wait=LONG).acquire().release

    return take


def django_redlock_sends(urls: list[str]) -> Taker:
    # With connections of its own, or the next contender would read the replies to its releases.
    manager = ours(f"sends-{len(urls)}-{urls[0].rpartition(':')[2]}", urls)

    def take(name: str) -> Callable[[], object]:
        return partial(manager.lock(name, wait=LONG).acquire().release, wait=False)

    return take


def redis_py(urls: list[str]) -> Taker:
    client = redis.Redis.from_url(urls[0])

    def take(name: str) -> Callable[[], object]:
        lock = client.lock(name, timeout=TTL)
        lock.acquire()
        return lock.release

    return take


def django_redis(urls: list[str]) -> Taker:
    cache = import_module("django_redis.cache").RedisCache(urls[0], {})

    def take(name: str) -> Callable[[], object]:
        lock = cache.lock(name, timeout=TTL)
        lock.acquire()
        return lock.release

    return take


def python_redis_lock(urls: list[str]) -> Taker:
    library, client = import_module("redis_lock"), redis.StrictRedis.from_url(urls[0])

    def take(name: str) -> Callable[[], object]:
        lock = library.Lock(client, name, expire=round(TTL))
        lock.acquire()
        return lock.release

    return take


def redlock_py(urls: list[str]) -> Taker:
    library = import_module("redlock").Redlock([redis.Redis.from_url(url) for url in urls])

    def take(name: str) -> Callable[[], object]:
        while not (lock := library.lock(name, round(TTL * 1000))):
            pass  # pottery has waited between its attempts, and gives up after three
        return partial(library.unlock, lock)

    return take


def pottery(urls: list[str]) -> Taker:
    library = import_module("pottery").Redlock
    masters = {redis.Redis.from_url(url) for url in urls}

    def take(name: str) -> Callable[[], object]:
        lock = library(key=name, masters=masters, auto_release_time=TTL)
        lock.acquire()
        return lock.release

    return take


BLOCKING: dict[str, Callable[[list[str]], Taker]] = {
    "django_redlock": django_redlock,
    SENDS: django_redlock_sends,
    "redis-py Lock": redis_py,
    "django-redis cache.lock": django_redis,
    "python-redis-lock": python_redis_lock,
    "redlock-py": redlock_py,
    "pottery Redlock": pottery,
}
ON_ONE_NODE = {"redis-py Lock", "django-redis cache.lock", "python-redis-lock"}
"""Those that use one server only, whatever they are given."""


def adjango_redlock(urls: list[str]) -> AsyncTaker:
    manager = manager_of(urls)

    async def take(name: str) -> Callable[[], Awaitable[object]]:
        return (await manager.lock(name, wait=LONG).aacquire()).arelease

    return take


def redis_asyncio(urls: list[str]) -> AsyncTaker:
    client = import_module("redis.asyncio").Redis.from_url(urls[0])

    async def take(name: str) -> Callable[[], Awaitable[object]]:
        lock = client.lock(name, timeout=TTL)
        await lock.acquire()
        return lock.release  # type: ignore[no-any-return]

    return take


def aioredlock(urls: list[str]) -> AsyncTaker:
    library = import_module("aioredlock").Aioredlock(urls)

    async def take(name: str) -> Callable[[], Awaitable[object]]:
        lock = await library.lock(name, lock_timeout=TTL)
        return partial(library.unlock, lock)

    return take


def pottery_asyncio(urls: list[str]) -> AsyncTaker:
    library, clients = import_module("pottery").AIORedlock, import_module("redis.asyncio")
    masters = {clients.Redis.from_url(url) for url in urls}

    async def take(name: str) -> Callable[[], Awaitable[object]]:
        lock = library(key=name, masters=masters, auto_release_time=TTL)
        await lock.acquire()
        return lock.release  # type: ignore[no-any-return]

    return take


ASYNCIO: dict[str, Callable[[list[str]], AsyncTaker]] = {
    "django_redlock": adjango_redlock,
    "redis.asyncio Lock": redis_asyncio,
    "aioredlock": aioredlock,
    "pottery AIORedlock": pottery_asyncio,
}


def try_blocking(name: str, urls: list[str]) -> Taker | str:
    """Return a taker that has taken a lock once, or the reason why it cannot."""
    try:
        take = BLOCKING[name](urls)
        take(f"first:{name}")()
        return take
    except Exception as error:  # whatever a library does on this Python, the others are measured
        return _why(name, error)


async def try_asyncio(name: str, urls: list[str]) -> AsyncTaker | str:
    """Do the same in the running event loop."""
    try:
        take = ASYNCIO[name](urls)
        await (await take(f"first:{name}"))()
        return take
    except Exception as error:
        return _why(name, error)


def _why(name: str, error: Exception) -> str:
    return f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
