"""Put back or fail the rows of dead workers."""

import time
from importlib.util import find_spec
from itertools import chain, repeat
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error, close_old_connections

from ...exceptions import QuorumUnavailableError, printable
from ..output import INTERRUPTED, MISUSED, NO_QUORUM, seconds

REFUSED = 1  # exit code: the database has refused to read or change a row


class Command(BaseCommand):
    """Find the rows of Django's tasks whose workers died, and put them back once, or fail them."""

    help = (
        "Find rows of singleton tasks that say RUNNING although their worker is dead, and put them back once, or fail "
        "them. Needs django-tasks-db. A worker counts as dead when its run has had no slot for three seconds."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Define the options."""
        parser.add_argument("--backend", default="default", metavar="ALIAS", help="alias in TASKS; default")
        parser.add_argument(
            "--every", type=seconds, metavar="SECONDS", help="look for ever, with this pause; otherwise twice"
        )
        parser.add_argument("--fail", action="store_true", help="fail the rows, instead of putting each back once")
        parser.add_argument("--dry-run", action="store_true", help="only say what would happen")

    def handle(self, *, backend: str, every: float | None, fail: bool, dry_run: bool, **options: Any) -> None:
        """Look twice, or for ever."""
        if not find_spec("django.tasks"):
            raise CommandError("redlock_reap_tasks needs Django 6.0, which brought django.tasks.", returncode=MISUSED)
        from ...tasks.reaper import APART, Reaper  # only here: it needs Django 6.0

        try:
            reaper = Reaper(backend, fail=fail, act=not dry_run)
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=MISUSED) from None
        missed = None
        try:
            for pause in (0, APART) if every is None else chain((0,), repeat(every)):
                time.sleep(pause)
                found, failed = self._look(reaper)
                missed = missed or failed  # a row has to be seen twice
                if failed and every is not None:
                    self.stderr.write(str(failed))
        except KeyboardInterrupt:
            self.stderr.write("")  # the terminal has shown ^C
            raise CommandError("Interrupted; what is listed above is done.", returncode=INTERRUPTED) from None
        if missed:
            code = NO_QUORUM if isinstance(missed, QuorumUnavailableError) else REFUSED
            raise CommandError(str(missed), returncode=code) from None
        if not found:
            self.stdout.write("No row of a dead worker.")

    def _look(self, reaper: Any) -> tuple[bool, Exception | None]:
        """Look once; return whether there was a row of a dead worker, and the error if not all rows are known."""
        close_old_connections()
        row = None
        try:
            for row in reaper.look():
                what = f"{printable(row.task)} {row.task_id}, of worker {printable(row.worker)}"
                self.stdout.write(f"{what}: {row.outcome}")
        except (QuorumUnavailableError, Error) as error:
            return row is not None, error
        return row is not None, None
