"""One worker process: takes the lock, increments under it, and records when it considers the lock its own."""

import json
import logging
import os
import random
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import django
from django.conf import settings
from django.db import DatabaseError

from django_redlock import Lease, LockLostError, RedlockError, StaleTokenError, locks, signals

django.setup()

from tests.services import django_database  # noqa: E402

from .counter import ALIAS, KINDS, increment  # noqa: E402

NAME = "counter"
THINK = 0.05  # seconds between reading and writing, at most


class Worker:
    """Works until it is killed, or asked to stop by the end of its standard input."""

    def __init__(self, order: dict[str, Any]) -> None:
        nodes = [{"URL": url, "NAME": f"node {place}"} for place, url in enumerate(order["urls"])]
        settings.REDLOCK = {"default": {"NODES": nodes, "KEY_PREFIX": "t", "OPTIONS": order["rules"]}}
        self.manager = locks["default"]
        self.ttl = order["rules"]["ttl"]
        signals.lock_extended.connect(self.extended)
        self.slow = order["slow"]
        # Written at once, without any buffer, because the records must survive the worker's death.
        self.diary = os.open(order["diary"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, *event: Any) -> None:
        os.write(self.diary, (json.dumps(event) + "\n").encode())

    def extended(self, lease: Lease, **about: Any) -> None:
        self.note("longer", time.monotonic() + lease.remaining())

    def work(self) -> None:
        """Take the lock once."""
        began = time.monotonic()
        try:
            lease = self.manager.lock(NAME, wait=5.0, renew=random.random() < 0.7).acquire()
        except RedlockError:
            self.note("failed")
            return
        since = time.monotonic()
        self.note("held", lease.fencing_token, began, since, since + lease.remaining())
        try:
            self.section(lease)
        finally:
            self.note("ends", time.monotonic())
            lease.release(wait=random.random() < 0.5)

    def section(self, lease: Lease) -> None:
        for _ in range(random.randrange(1, 4)):
            for kind in KINDS:
                pause = 2 * self.ttl if random.random() < self.slow else THINK
                try:
                    lease.ensure()
                    increment(kind, lease, pause)
                    self.note("done", kind)
                except StaleTokenError:
                    self.note("stale")
                except LockLostError:
                    self.note("lost")
                    return
                except DatabaseError:
                    pass  # another transaction blocked it for too long
            if not lease.valid():
                return


def surprised(caught: threading.ExceptHookArgs) -> None:
    """End the worker, because of an error that nobody expects."""
    sys.excepthook(caught.exc_type, caught.exc_value or caught.exc_type(), caught.exc_traceback)
    os._exit(1)


def main() -> None:
    """Work as the argument says."""
    threading.excepthook = surprised
    # Losses of locks and nodes are expected here.
    logging.getLogger("django_redlock").addFilter(lambda record: bool(record.exc_info))
    order = json.loads(sys.argv[1])
    random.seed(order["seed"])
    worker = Worker(order)
    with django_database(ALIAS, order["database"]), suppress(KeyboardInterrupt):
        print("ready", flush=True)
        until = time.monotonic() + order["seconds"]
        while time.monotonic() < until:
            worker.work()
    worker.manager.close()


if __name__ == "__main__":
    main()
