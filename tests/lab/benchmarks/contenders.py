"""
Comparable libraries, each used as its own documentation says, ours in the same shape, and raw sockets.

A *taker* waits for a lock and returns a function that releases it; clients are made once, locks for each use.
"""

import asyncio
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import redis

from django_redlock import lock
from django_redlock.testing import FaultProxy

from .bench import TTL, Contender, manager_of, ours
from .report import Section

Taker = Callable[[str], Callable[[], object]]

MANAGER = "django_redlock, acquire() and release()"
SENDS = "django_redlock, release sent"
REDIS_PY = "redis-py Lock"
LONG = 600.0  # seconds: the longest wait of a waiter


def with_lock(urls: list[str]) -> Callable[[str], None]:
    """Return what README shows."""
    alias = manager_of(urls).alias

    def once(name: str) -> None:
        with lock(name, using=alias):
            pass

    return once


def with_client_lock(urls: list[str]) -> Callable[[str], None]:
    """Return what redis-py's documentation shows."""
    client = redis.Redis.from_url(urls[0])

    def once(name: str) -> None:
        with client.lock(name, timeout=TTL):
            pass

    return once


def django_redlock(urls: list[str]) -> Taker:
    manager = manager_of(urls)
    return lambda name: manager.lock(name, wait=LONG).acquire().release


def django_redlock_sends(urls: list[str]) -> Taker:
    # With connections of its own, or the next contender would read the replies to its releases.
    manager = ours(f"sends-{len(urls)}-{urls[0].rpartition(':')[2]}", urls)
    return lambda name: partial(manager.lock(name, wait=LONG).acquire().release, wait=False)


def acquired(lock: Any) -> Callable[[], object]:
    lock.acquire()
    return lock.release  # type: ignore[no-any-return]


def redis_py(urls: list[str]) -> Taker:
    client = redis.Redis.from_url(urls[0])
    return lambda name: acquired(client.lock(name, timeout=TTL))


def python_redis_lock(urls: list[str]) -> Taker:
    library, client = import_module("redis_lock"), redis.StrictRedis.from_url(urls[0])
    return lambda name: acquired(library.Lock(client, name, expire=round(TTL)))


def redlock_py(urls: list[str]) -> Taker:
    library = import_module("redlock").Redlock([redis.Redis.from_url(url) for url in urls])

    def take(name: str) -> Callable[[], object]:
        while not (lock := library.lock(name, round(TTL * 1000))):
            pass  # it has waited between its attempts, and gives up after three
        return partial(library.unlock, lock)

    return take


def pottery(urls: list[str]) -> Taker:
    library, masters = import_module("pottery").Redlock, {redis.Redis.from_url(url) for url in urls}
    return lambda name: acquired(library(key=name, masters=masters, auto_release_time=TTL))


TAKERS: dict[str, Callable[[list[str]], Taker]] = {
    MANAGER: django_redlock,
    SENDS: django_redlock_sends,
    REDIS_PY: redis_py,
    "python-redis-lock": python_redis_lock,
    "redlock-py": redlock_py,
    "pottery Redlock": pottery,
}
ON_ONE_NODE = {REDIS_PY, "python-redis-lock"}
"""Those that use one server only, whatever they are given."""


def takers(section: Section, urls: list[str]) -> dict[str, Taker]:
    """Return the contenders that work here; the section says why the others are left out."""
    found: dict[str, Taker] = {}
    for name, make in TAKERS.items():
        if len(urls) > 1 and name in ON_ONE_NODE:
            continue
        try:
            take = make(urls)
            take(f"first:{name}")()
            found[name] = take
        except Exception as error:  # whatever a library does on this Python, the others are measured
            section.left_out.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
    return found


# Raw sockets

FLOOR = "raw sockets, the same scripts"
COMMANDS = re.compile(rb"(?=\*\d+\r\n\$)")  # each begins with the number of its words


def connect(url: str) -> socket.socket:
    sock = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def recorded(urls: list[str]) -> tuple[Callable[[], bytes], bytes]:
    """Return the requests of this package, recorded from it: the first with a higher fencing token each time."""
    for url in urls:
        manager_of([url]).lock("floor", wait=0).acquire().release()  # now this server knows the scripts
    with Tap(urls[0]) as tap:
        manager = ours(f"floor-{urlsplit(tap.url).port}", [tap.url])
        manager.lock("floor", wait=0).acquire().release()
        tap.taken()
        lease = manager.lock("floor", wait=0).acquire()
        acquire = tap.taken()
        lease.release()
        release = tap.taken()
        manager.close()
    head, found, tail = acquire.partition(str(lease.fencing_token).encode())
    assert found, "the fencing token is no longer part of the request"
    return lambda: b"%b%d%b" % (head, time.time_ns() // 1000, tail), release


class Tap(FaultProxy):
    """A proxy that keeps the scripts that its clients call."""

    said = b""

    def taken(self) -> bytes:
        """Return the scripts called since the last call of this method, as they were sent."""
        said, self.said = self.said, b""
        return b"".join(command for command in COMMANDS.split(said) if b"EVAL" in command[:20])

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read = reader.read

        async def kept(size: int) -> bytes:
            data = await read(size)
            self.said += data
            return data

        reader.read = kept
        await super()._relay(reader, writer)


@contextmanager
def raw_sockets(urls: list[str]) -> Iterator[Contender]:
    """Give the floor: write to all nodes, read from all, and decide nothing."""
    acquire, release = recorded(urls)
    with ExitStack() as stack:
        sockets = [stack.enter_context(connect(url)) for url in urls]

        def exchange(request: bytes) -> None:
            for sock in sockets:
                sock.send(request)
            for sock in sockets:
                reply = sock.recv(4096)
                if reply[:1] in (b"-", b"_", b"") or reply[:2] == b"$-" or b"BUSY" in reply:
                    raise RuntimeError(f"the server replied {reply!r}: the times would mean nothing")

        def once() -> None:
            exchange(acquire())
            exchange(release)

        yield Contender(FLOOR, once)
