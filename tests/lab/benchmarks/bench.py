"""Give every group of rows its servers, the locks over them, and the measuring time."""

import asyncio
import logging
import multiprocessing
import selectors
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, TypeVar

import django
from django.conf import settings

if TYPE_CHECKING:  # another version of the package may be under test
    from django_redlock import LockManager
    from django_redlock.testing import Servers

Result = TypeVar("Result")

TTL = 30.0  # seconds, for every contender
APPS = ("admin", "auth", "contenttypes", "messages", "sessions", "staticfiles")
ENGINE = "django.template.backends.django.DjangoTemplates"
PROCESSORS = ("template.context_processors.request", "contrib.auth.context_processors.auth")
MIDDLEWARE = ("sessions.middleware.Session", "auth.middleware.Authentication", "messages.middleware.Message")


@dataclass(frozen=True, slots=True)
class Bench:
    """One run."""

    servers: "Servers"
    quick: bool

    def rounds(self, full: int, quick: int | None = None) -> int:
        """Return how often to repeat a measurement: *full* times, in a quick run a tenth of that, or *quick* times."""
        if not self.quick:
            return full
        return max(3, full // 10) if quick is None else quick

    def urls(self, nodes: int) -> list[str]:
        """Return the addresses of the first servers, as many as there are *nodes*."""
        return list(self.servers.urls)[:nodes]


def ours(alias: str, urls: list[str], *, prefix: str = "", **options: Any) -> "LockManager":
    """
    Return the locks of an alias of ``REDLOCK`` made of these servers, as a project would have them.

    Servers that have just started vote at once, because nothing was locked before.
    """
    from django_redlock import locks

    if alias not in settings.REDLOCK:
        settings.REDLOCK[alias] = {
            "NODES": urls,
            "KEY_PREFIX": prefix or alias,
            "OPTIONS": {"ttl": TTL, "restart_guard": False, **options},
        }
    return locks[alias]


def manager_of(urls: list[str]) -> "LockManager":
    """Return our locks over these servers; the same object every time, so that only the servers make a difference."""
    return ours(f"on-{len(urls)}-{urls[0].rpartition(':')[2]}", urls)


def set_up() -> None:
    """Make this process a Django project."""
    if not settings.configured:
        settings.configure(
            SECRET_KEY="for benchmarks only",
            USE_TZ=True,
            ALLOWED_HOSTS=["testserver"],
            ROOT_URLCONF="tests.urls",
            INSTALLED_APPS=[*(f"django.contrib.{name}" for name in APPS), "django_redlock"],
            MIDDLEWARE=[f"django.contrib.{name}Middleware" for name in MIDDLEWARE],
            TEMPLATES=[
                {
                    "BACKEND": ENGINE,
                    "APP_DIRS": True,
                    "OPTIONS": {
                        "context_processors": [
                            *(f"django.{name}" for name in PROCESSORS),
                            "django.contrib.messages.context_processors.messages",
                        ]
                    },
                }
            ],
            STATIC_URL="static/",
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
            REDLOCK={},
        )
    django.setup()


def children() -> BaseContext:
    """
    Return a context that starts processes that share nothing with this one.

    They are forked from a process that has imported everything and opened nothing, so fifty of them start quickly.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.lab.benchmarks.preload"])
    return context


def in_child(function: Callable[..., Result], *args: Any) -> Result:
    """Run *function* in a process of its own and return its result; the function must be importable by name."""
    with children().Pool(1) as pool:
        return pool.apply(function, args)


class Proxies:
    """A proxy in front of each of some servers; a fault hits all of them."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.urls: list[str] = pipe.recv()

    def tell(self, method: str, *args: object) -> None:
        """Call a method of every :class:`~django_redlock.testing.FaultProxy`, and wait until it returns."""
        self._pipe.send((method, args))
        self._pipe.recv()


@contextmanager
def proxies(urls: list[str], round_trip: float = 0.0) -> Iterator[Proxies]:
    """Start proxies in one child process, so that forwarding bytes takes no time from the measurement."""
    context = children()
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, urls), daemon=True)
    process.start()
    try:
        network = Proxies(here)
        network.tell("delay", round_trip / 2)
        yield network
    finally:
        here.send(None)
        process.join(10)


def _exact() -> asyncio.AbstractEventLoop:
    """Return an event loop that waits with ``select``, whose timeout is in microseconds and not in milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def _serve(pipe: Connection, urls: list[str]) -> None:
    from django_redlock.testing import FaultProxy

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # before 3.12 it reports every connection that was reset
    sys.setswitchinterval(0.001)  # two threads of this process take turns for every byte
    asyncio.new_event_loop = _exact  # in this process only
    with ExitStack() as stack:
        running = [stack.enter_context(FaultProxy(url)) for url in urls]
        pipe.send([proxy.url for proxy in running])
        while told := pipe.recv():
            for proxy in running:
                getattr(proxy, told[0])(*told[1])
            pipe.send("done")
