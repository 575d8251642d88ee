"""
Give every group of rows its servers, the locks over them, and the measuring time.
"""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

import django
from django.conf import settings

from django_redlock import LockManager, locks
from django_redlock.testing import Servers

Result = TypeVar("Result")

TTL = 30.0  # seconds, for every contender

APPS = ("admin", "auth", "contenttypes", "messages", "sessions", "staticfiles")
ENGINE = "django.template.backends.django.DjangoTemplates"
PROCESSORS = [
    "django.template.context_processors.request",
    "django.contrib.auth.context_processors.auth",
    "django.contrib.messages.context_processors.messages",
]


@dataclass(frozen=True, slots=True)
class Bench:
    """
    One run.

    Args:
        servers: Five servers that nobody else uses.
        quick: Whether a few repetitions are enough.
        seconds: How long to observe slow work, such as renewal.
        through: Addresses through which to reach the servers; empty reaches them directly.
    """

    servers: Servers
    quick: bool
    seconds: float
    through: tuple[str, ...] = ()

    def rounds(self, full: int, quick: int | None = None) -> int:
        """
        Return how often to repeat a measurement: *full* times, or for a quick run a tenth of that or *quick* times.
        """
        if not self.quick:
            return full
        return max(3, full // 10) if quick is None else quick

    def urls(self, nodes: int) -> list[str]:
        """Return the addresses of the first servers, as many as there are *nodes*."""
        return list(self.through or self.servers.urls)[:nodes]


def ours(alias: str, urls: list[str], *, prefix: str = "", **options: Any) -> LockManager:
    """
    Return the locks of an alias of ``REDLOCK`` made of these servers, as a project would have them.

    Servers that have just started vote at once, because nothing was locked before.
    """
    if alias not in settings.REDLOCK:
        settings.REDLOCK[alias] = {
            "NODES": urls,
            "KEY_PREFIX": prefix or alias,
            "OPTIONS": {"ttl": TTL, "restart_guard": False, **options},
        }
    return locks[alias]


def manager_of(urls: list[str], **options: Any) -> LockManager:
    """Return our locks over these servers; the same object every time, so that only the servers make a difference."""
    return ours(f"on-{len(urls)}-{urls[0].rpartition(':')[2]}", urls, **options)


def set_up() -> None:
    """Make this process a Django project."""
    if not settings.configured:
        settings.configure(
            SECRET_KEY="for benchmarks only",
            USE_TZ=True,
            ALLOWED_HOSTS=["testserver"],
            ROOT_URLCONF="tests.urls",
            INSTALLED_APPS=[*(f"django.contrib.{name}" for name in APPS), "django_redlock"],
            MIDDLEWARE=[
                "django.contrib.sessions.middleware.SessionMiddleware",
                "django.contrib.auth.middleware.AuthenticationMiddleware",
                "django.contrib.messages.middleware.MessageMiddleware",
            ],
            TEMPLATES=[{"BACKEND": ENGINE, "APP_DIRS": True, "OPTIONS": {"context_processors": PROCESSORS}}],
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
