"""List the held locks of an alias, for people or for programs."""

import csv
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from io import StringIO
from typing import Any

from django.core.management.base import CommandParser, no_translations

from ...core.rules import DEFAULT_ALIAS
from ...exceptions import printable
from ...inventory import LockReport, Snapshot, State
from ..output import VERSION, OperatorCommand, entry, holder, iso, listing, matching, positive

ORDERS: dict[str, Callable[[LockReport], Any]] = {
    "remaining": lambda lock: (lock.remaining is None, lock.remaining),
    "name": lambda lock: lock.name,
    "state": lambda lock: lock.state,
    "votes": lambda lock: lock.votes,
    "since": lambda lock: (lock.since is None, lock.since),
    "holder": lambda lock: str(lock.owner or ""),
    "extensions": lambda lock: lock.extensions,
}
FIELDS = ("name", "state", "remaining", "ttl", "votes", "nodes", "extensions", "fencing_token", "fingerprint", "since")
# A spreadsheet takes text for a formula if one of these signs begins a cell, even behind blanks or a quotation mark.
# Where the decimal separator is a comma, a semicolon ends a cell.
SIGNS = "=+@-\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}\N{FULLWIDTH COMMERCIAL AT}\N{FULLWIDTH HYPHEN-MINUS}"
FORMULA = re.compile(rf'(^|;)([\s"]*)(?=[{re.escape(SIGNS)}])')


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
        parser.add_argument(
            "--notes", action="store_true", help="Instead of locks, list what singleton tasks have noted on the nodes."
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
        notes: bool,
        format: str,
        sort: str,
        limit: int | None,
        wide: bool,
        **options: Any,
    ) -> None:
        """Write the list, then report on standard error what is missing from it."""
        snapshot = listing(using)
        unlisted = 0 if notes else len(snapshot.notes)
        if notes:
            snapshot = replace(snapshot, locks=snapshot.notes)
        locks = [lock for lock in matching(snapshot, match) if not state or lock.state in state]
        locks = sorted(locks, key=ORDERS[sort])[:limit]
        if format == "json":
            self.stdout.write(document(snapshot, locks))
        else:
            self.stdout.write(sheet(locks) if format == "csv" else self.table(locks, snapshot, wide))
            if unlisted and format == "table":
                self.stdout.write(f"Notes of singleton tasks, which hold no lock: {unlisted}. List them with --notes.")
        self.warn(snapshot, "what is held")


def document(snapshot: Snapshot, locks: list[LockReport]) -> str:
    """Return locks and nodes as JSON; its keys are described in docs/reference/api.md."""
    return json.dumps(
        {
            "version": VERSION,
            "using": snapshot.alias,
            "taken": iso(snapshot.taken),
            "complete": snapshot.complete and snapshot.has_quorum,
            "quorum": {
                "nodes": len(snapshot.nodes),
                "answering": snapshot.answering,
                "needed": snapshot.rules.needed,
                "met": snapshot.has_quorum,
            },
            "nodes": [asdict(node) for node in snapshot.nodes],
            "locks": [entry(lock) for lock in locks],
            "wrong_type": [{"name": each.name, "node": each.node, "key": each.key} for each in snapshot.wrong_type],
        },
        indent=2,
    )


def sheet(locks: list[LockReport]) -> str:
    """Return locks as comma-separated values, with the names of the fields in the first line."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*FIELDS, "holder"])
    for lock in locks:
        about = entry(lock)
        writer.writerow([_unambiguous(about[field]) for field in FIELDS] + [_unambiguous(holder(lock))])
    return out.getvalue().rstrip("\n")


def _unambiguous(value: Any) -> Any:
    """Return a value that no spreadsheet takes for a formula, because names come from outside."""
    return FORMULA.sub(r"\1\2'", printable(value)) if isinstance(value, str) else value
