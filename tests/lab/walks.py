"""
The steps that a reader takes through the package: calls, modules and changes of module of three operations.

Run it as ``python -m tests.lab.walks``; ``--calls`` prints every call of the free lock, indented by depth.
"""

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import django

import django_redlock
from django_redlock.testing.servers import start_servers

PACKAGE = f"{Path(django_redlock.__file__).parent}{os.sep}"
HERE = __file__


class Call(NamedTuple):
    """A call of a Python function."""

    depth: int
    file: str
    name: str

    def __str__(self) -> str:
        return f"{'  ' * self.depth}{self.name} · {self.file.removeprefix(PACKAGE)}"


class Walk:
    """The calls that are made while it records, in every thread that was started after :meth:`install`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._recording = False
        self._depth = 0

    def install(self) -> None:
        """Watch this thread, and those that it starts."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls in the ``with`` block."""
        self._recording, self._depth = True, 0
        try:
            yield
        finally:
            self._recording = False

    @property
    def modules(self) -> list[str]:
        """The modules of the package that are executed."""
        return sorted({each.file.removeprefix(PACKAGE) for each in self.calls if each.file.startswith(PACKAGE)})

    @property
    def changes(self) -> int:
        """How often one call is in another module than the call before; generated constructors are in no module."""
        files = [each.file for each in self.calls if each.file != "<string>"]
        return sum(before != after for before, after in pairwise(files))

    def count(self, name: str) -> int:
        """Return how many functions with this name are called."""
        return sum(each.name.rpartition(".")[2] == name for each in self.calls)

    def _note(self, frame: FrameType, event: str, about: Any) -> None:
        code = frame.f_code
        if not self._recording or code.co_filename in (HERE, contextlib.__file__):
            return
        if event == "call":
            self.calls.append(Call(self._depth, code.co_filename, code.co_qualname))
            self._depth += 1
        elif event == "return":
            self._depth = max(0, self._depth - 1)


def walked(action: Callable[[], object], warm: int = 20) -> Walk:
    """Return the walk of the calling thread through *action*, which has been done before."""
    for _ in range(warm):
        action()
    walk = Walk()
    walk.install()
    try:
        with walk.recording():
            action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # this is how Python documents it
    return walk


def free_lock() -> Walk:
    """Take and leave a free lock."""
    from django_redlock import lock

    def block() -> None:
        with lock("a", wait=0):
            pass

    return walked(block)


def singleton() -> Walk:
    """Publish a singleton task and run it, in a worker with one thread and no other process."""
    from celery import Celery
    from celery.contrib.testing.worker import start_worker

    from django_redlock.celery import singleton_task

    app = Celery("walks", broker="memory://", backend="cache+memory://")
    app.conf.worker_hijack_root_logger = False

    @singleton_task(app=app, name="walks.sync", key=("shop_id",))
    def sync(shop_id: int) -> int:
        return shop_id

    walk = Walk()
    threading.setprofile(walk._note)  # before the worker's thread starts
    try:
        with start_worker(app, pool="solo", perform_ping_check=False, loglevel="ERROR"):
            sync.delay(1).get(timeout=30)
            sys.setprofile(walk._note)
            with walk.recording():
                sync.delay(2).get(timeout=30)
            sys.setprofile(None)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return walk


def admin_list() -> Walk:
    """Show the admin's list with one lock."""
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.test import Client

    from django_redlock import lock

    call_command("migrate", verbosity=0)
    client = Client()
    client.force_login(User.objects.create_superuser("walks"))
    with lock("a", wait=0):
        return walked(lambda: client.get("/admin/redlock/heldlock/"), warm=2)


def main() -> None:
    """Print the walks."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.walks", description=__doc__.split("\n")[1])
    parser.add_argument("--calls", action="store_true", help="print every call of the free lock")
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from django.conf import settings

    from django_redlock import locks

    with start_servers(1) as servers:
        settings.REDLOCK = {"default": {"NODES": servers.urls}}
        settings.ALLOWED_HOSTS = ["testserver"]
        locks.reset()
        free, task, page = free_lock(), singleton(), admin_list()
        locks.reset()
    files = len({each.file for each in free.calls})
    print(f"free lock, one Redis, warm: {len(free.calls)} calls, {files} modules, {free.changes} changes of module")
    print(f"singleton, published and run: {len(task.modules)} modules of the package")
    print(f"admin list, one lock: {len(page.modules)} modules of the package, {page.count('survey')} surveys")
    for call in free.calls if options.calls else ():
        print(call)


if __name__ == "__main__":
    main()
