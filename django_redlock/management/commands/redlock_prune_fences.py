"""Delete fences that nobody has claimed for a long time."""

from argparse import ArgumentTypeError
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.models.functions import Now

from ...fencing import missing_table_explained
from ...models import Fence
from ..output import MISUSED, positive

LONGEST = 36_500  # days; no database's clock can count further back


def days(text: str) -> int:
    """Return the number of days in the text of an option."""
    number = positive(text)
    if number > LONGEST:
        raise ArgumentTypeError(f"must be at most {LONGEST} days, not {text!r}")
    return number


class Command(BaseCommand):
    """Delete old fences: small rows, one per lock name, that stay behind when a name is never used again."""

    help = (
        "Delete the fences that no transaction has claimed for many days. A holder that slept through all that time "
        "would be let in again, so use a time that no process, virtual machine or backup can sleep."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument(
            "--older-than", type=days, default=90, metavar="DAYS", help="The least age; 90 days by default."
        )
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, metavar="ALIAS", help="Alias in DATABASES.")
        parser.add_argument("--dry-run", action="store_true", help="Only report how many would be deleted.")

    def handle(self, *, older_than: int, database: str, dry_run: bool, **options: Any) -> None:
        """Count or delete old fences by the clock of the database, which also dated them."""
        if database not in connections:
            known = ", ".join(sorted(connections))
            raise CommandError(f"DATABASES has no {database!r}; it has {known}.", returncode=MISUSED)
        fences = Fence.objects.using(database)
        try:
            with missing_table_explained(database):
                now = fences.order_by().values_list(Now()).first()
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=MISUSED) from None
        old = fences.filter(updated__lt=now[0] - timedelta(days=older_than)) if now else fences.none()
        # One statement with the condition. If anybody listens to signals of models, delete() reads the rows first, and
        # deletes them by their keys, although they may have been claimed meanwhile.
        count = old.count() if dry_run else old._raw_delete(database) or 0
        what = "1 fence" if count == 1 else f"{count} fences"
        self.stdout.write(f"Dry run: {what} would be deleted." if dry_run else f"Deleted {what}.")
