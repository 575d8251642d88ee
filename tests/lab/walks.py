"""
The steps that a reader takes through the package: calls, modules and changes of module of three operations.

Run it as ``python -m tests.lab.walks``; ``--calls`` prints every call of the free lock, indented by depth.
"""

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import django

import django_redlock
from django_redlock.testing.servers import start_servers

PACKAGE = f"{Path(django_redlock.__file__).parent}{os.sep}"


class Call(NamedTuple):
    """A call of a Python function."""

    depth: int
    file: str
    name: str


class Walk:
    """The calls that are made while it records, in this thread and in those that are started in :meth:`watching`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._recording = False
        self._depth = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread, and those that it starts."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # this is how Python documents it

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls in the ``with`` block."""
        self._recording, self._depth = True, 0
        try:
            yield
        finally:
            self._recording = False

    @property
    def modules(self) -> set[str]:
        """The modules of the package that are executed."""
        return {each.file for each in self.calls if each.file.startswith(PACKAGE)}

    def _note(self, frame: FrameType, event: str, about: Any) -> None:
        code = frame.f_code
        if not self._recording or code.co_filename in (__file__, contextlib.__file__):
            return
        if event == "call":
            self.calls.append(Call(self._depth, code.co_filename, code.co_qualname))
            self._depth += 1
        elif event == "return":
            self._depth = max(0, self._depth - 1)


def free_lock() -> Walk:
    """Take and leave a free lock, which has been done before."""
    from django_redlock import lock

    def block() -> None:
        with lock("a", wait=0):
            pass

    for _ in range(20):
        block()
    walk = Walk()
    with walk.watching(), walk.recording():
        block()
    return walk


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
    with walk.watching(), start_worker(app, pool="solo", perform_ping_check=False, loglevel="ERROR"):
        sync.delay(1).get(timeout=30)
        with walk.recording():
            sync.delay(2).get(timeout=30)
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
    walk = Walk()
    with lock("a", wait=0):
        for _ in range(2):
            client.get("/admin/redlock/heldlock/")
        with walk.watching(), walk.recording():
            client.get("/admin/redlock/heldlock/")
    return walk


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
    files = {call.file for call in free.calls}
    steps = [call.file for call in free.calls if call.file != "<string>"]  # generated constructors are in no module
    changes = sum(before != after for before, after in pairwise(steps))
    surveys = sum(call.name.rpartition(".")[2] == "survey" for call in page.calls)
    print(f"free lock, one Redis, warm: {len(free.calls)} calls, {len(files)} modules, {changes} changes of module")
    print(f"singleton, published and run: {len(task.modules)} modules of the package")
    print(f"admin list, one lock: {len(page.modules)} modules of the package, {surveys} surveys")
    for call in free.calls if options.calls else ():
        print(f"{'  ' * call.depth}{call.name} · {call.file.removeprefix(PACKAGE)}")


if __name__ == "__main__":
    main()
