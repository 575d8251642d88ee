"""List the held locks of an alias, for people or for programs."""

from typing import Any

from django.core.management.base import CommandError, CommandParser, no_translations

from ...conf import DEFAULT_ALIAS
from ...inventory import HeldLock, Snapshot, State
from ..output import (
    NO_QUORUM,
    ORDERS,
    OperatorCommand,
    chosen,
    document,
    listing,
    positive,
    sheet,
    table,
    warn,
    with_waiters,
)


class Command(OperatorCommand):
    """``manage.py redlock_list``."""

    help = "List the held locks: state, time left, votes, holder. Exits with 3 when too few nodes answer."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument("--using", default=DEFAULT_ALIAS, metavar="ALIAS", help="Alias in REDLOCK.")
        parser.add_argument("--match", metavar="GLOB", help="Only locks whose name matches, such as 'orders:*'.")
        parser.add_argument(
            "--state", action="append", choices=State.values, help="Only locks in this state; may be repeated."
        )
        parser.add_argument("--format", default="table", choices=("table", "json", "csv"), help="Default: table.")
        parser.add_argument(
            "--sort", default="remaining", choices=tuple(ORDERS), help="Default: remaining, the soonest end first."
        )
        parser.add_argument("--limit", type=positive, metavar="N", help="List only the first N locks in that order.")
        parser.add_argument(
            "--wide", action="store_true", help="Neither cut nor leave out anything, whatever the terminal's width."
        )

    @no_translations
    def handle(
        self,
        *,
        using: str,
        match: str | None,
        state: list[str] | None,
        format: str,
        sort: str,
        limit: int | None,
        wide: bool,
        **options: Any,
    ) -> None:
        """Write the list, then report on standard error what is missing from it."""
        snapshot = listing(using)
        locks = chosen(snapshot, match, state, sort)[:limit]
        if format == "json":
            self.stdout.write(document(snapshot, locks))
        else:
            shown = sheet(locks) if format == "csv" else self._table(snapshot, locks, wide)
            self.stdout.write(shown)
        warn(self, snapshot)
        if not snapshot.has_quorum:
            raise CommandError("Too few nodes answer to say what is held.", returncode=NO_QUORUM)

    def _table(self, snapshot: Snapshot, locks: list[HeldLock], wide: bool) -> str:
        return table(with_waiters(snapshot, locks), known=snapshot.has_quorum, width=self.width(wide))
