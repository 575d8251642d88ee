"""
Write ended locks to the database, later and in another thread (internal).
"""

import atexit
import logging
import math
import os
import socket
import sys
import threading
import time
from collections import deque
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.util import Finalize, register_after_fork
from typing import Any

from django.db import Error, close_old_connections, connections, router
from django.utils import timezone

from ...conf import is_test_run
from ...exceptions import printable
from ...runtime.background import Background
from ...runtime.clock import steady
from ..telemetry import end_of, listen, outcome_of, template

UID = "history"
EVERY = 5.0  # seconds between two writes
MOST = 10_000  # rows that a process keeps in memory; more are dropped
KEEP = timedelta(days=30)
HOUR = 3600.0  # seconds between two deletions of old rows

log = logging.getLogger("django_redlock")


class Recorder:
    """The rows that a process has not written yet, and the thread that writes them while there are any."""

    def __init__(self) -> None:
        self._start_over()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start_over)
        atexit.register(self.flush)

    def _start_over(self) -> None:
        """Start without rows; in a forked child, leave the parent's rows to the parent."""
        self._rows: deque[dict[str, Any]] = deque(maxlen=MOST)
        self._thread = Background(self._run, self._rows.__len__, "django_redlock history")
        self._pruned = -math.inf

    def listen(self) -> None:
        """Start to record ended locks."""
        listen(UID, lock_taken=self._gave_up, lock_released=self._ended, lock_lost=self._ended)
        if "celery" in sys.modules:
            from celery.signals import worker_process_shutdown  # only here: Celery is optional

            # The children of a worker end without their exit handlers.
            worker_process_shutdown.connect(lambda **about: self.flush(), weak=False, dispatch_uid=UID)
        # So do those of Python; they run finalizers, but not those of their parents.
        register_after_fork(self, Recorder._flush_at_end)
        if parent_process():
            self._flush_at_end()

    def _flush_at_end(self) -> None:
        """Write the rows of this child process before it ends, in a thread: its parent may use the same connections."""

        def write() -> None:
            self.flush()
            connections.close_all()

        def end() -> None:
            if self._rows:
                thread = threading.Thread(target=write, daemon=True)
                thread.start()
                thread.join()

        Finalize(None, end, exitpriority=0)

    def flush(self) -> int:
        """Write the waiting rows and return their number; if the database fails, the rows are lost without an error."""
        from .models import Hold  # only here: Django's apps must be ready

        rows = []
        while self._rows:
            rows.append(self._rows.popleft())
        if not rows:
            return 0
        try:
            connection = connections[router.db_for_write(Hold)]
            if not connection.in_atomic_block and not connection.get_autocommit():
                connection.rollback()  # at the end of a process, of what the project has not committed
                connection.set_autocommit(True)
            Hold.objects.bulk_create([Hold(**row) for row in rows], batch_size=500)
        except Error as error:  # not only a DatabaseError: a closed connection is an InterfaceError
            log.warning("the history of %d locks was not written: %s", len(rows), type(error).__name__)
            return 0
        try:
            if steady() - self._pruned > HOUR:
                self._pruned = steady()
                Hold.objects.filter(ended__lt=timezone.now() - KEEP).delete()
        except Error as error:
            log.warning("old rows of the history were not deleted: %s", type(error).__name__)
        return len(rows)

    def _gave_up(self, sender: Any, name: str, error: Any, **about: Any) -> None:
        self._note(sender.alias, name, outcome_of(error), error.waited)

    def _ended(self, sender: Any, lease: Any, outcome: str = "", **about: Any) -> None:
        self._note(
            *(sender.alias, lease.name, end_of(lease, outcome), lease.waited),
            held=lease.held(),
            ttl=lease.ttl,
            extensions=lease.extensions,
            fencing_token=lease.fencing_token,
        )

    def _note(self, alias: str, name: str, outcome: str, waited: float, **more: Any) -> None:
        # The rows of a test would be written into another test's transaction, or, when the process ends and the test
        # databases are gone, into the database of the project.
        if is_test_run():
            return
        self._rows.append(
            {
                "alias": alias[:100],
                "name": printable(name)[:200],
                "template": printable(template(name))[:100],
                "outcome": outcome[:20],
                "waited": waited,
                "host": socket.gethostname()[:100],
                "pid": os.getpid(),
                "ended": timezone.now(),
                **more,
            }
        )
        self._thread.start()

    def _run(self) -> None:
        while self._rows:
            time.sleep(EVERY)
            try:
                close_old_connections()
                self.flush()
            except Exception:  # if this thread died, each lock that ends next would start another
                log.exception("the history of locks was not written")
        connections.close_all()


recorder = Recorder()
"""The recorder of this process."""
