"""List the held locks of an alias, for people or for programs."""

import json
from argparse import ArgumentTypeError
from dataclasses import asdict
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ...conf import DEFAULT_ALIAS, InvalidRedlockError
from ...core.names import check_name, slug
from ...inventory import HeldLock, Snapshot, State, find_locks, held_locks, printable

NO_QUORUM = 3
VERSION = 1  # of the JSON document; grows when a key is removed or changes its meaning
COLUMNS = ("LOCK", "STATE", "REMAINING", "VOTES", "HOLDER", "SINCE", "TOKEN")


class Command(BaseCommand):
    """``manage.py redlock_list``."""

    help = "List the held locks: state, time left, votes, holder. Exits with 3 when too few nodes answer."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument("--using", default=DEFAULT_ALIAS, metavar="ALIAS", help="Alias in REDLOCK.")
        parser.add_argument("--match", metavar="GLOB", help="Only locks whose name matches, such as 'orders:*'.")
        parser.add_argument(
            "--state", action="append", choices=State.values, help="Only locks in this state; may be repeated."
        )
        parser.add_argument("--format", default="table", choices=("table", "json"), help="Default: table.")
        parser.add_argument("--limit", type=positive, metavar="N", help="At most so many, those that end first.")

    def handle(
        self,
        *,
        using: str,
        match: str | None,
        state: list[str] | None,
        format: str,
        limit: int | None,
        **options: Any,
    ) -> None:
        """Write the list, then say on standard error what is missing in it."""
        snapshot = listing(using)
        chosen = [
            lock
            for lock in snapshot.locks
            if (match is None or fnmatchcase(lock.name, match)) and (not state or lock.state in state)
        ][:limit]
        self.stdout.write(document(snapshot, chosen) if format == "json" else table(chosen))
        warn(self, snapshot)
        if not snapshot.has_quorum:
            raise CommandError("Too few nodes answer to say what is held.", returncode=NO_QUORUM)


def positive(text: str) -> int:
    """Return a whole number from 1 that an option was given."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"must be a whole number from 1, not {text!r}")
    return number


def seconds(text: str) -> float:
    """Return a positive number of seconds that an option was given."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return number


def listing(using: str, names: list[str] | None = None) -> Snapshot:
    """Return the held locks of an alias, or only those named, or fail as a command does."""
    try:
        return find_locks([slug(check_name(name)) for name in names], using) if names else held_locks(using)
    except (InvalidRedlockError, ValueError) as error:
        raise CommandError(str(error)) from None


def warn(command: BaseCommand, snapshot: Snapshot) -> None:
    """Say on standard error what is missing in a listing."""
    if snapshot.trouble:
        command.stderr.write(command.style.WARNING(f"{snapshot.quorum} Trouble: {snapshot.trouble}."))
    if not snapshot.complete:
        text = "There are more locks than one listing asks for; these end first."
        command.stderr.write(command.style.WARNING(text))


def table(locks: list[HeldLock]) -> str:
    """Return the locks as lines of plain text."""
    if not locks:
        return "No locks."
    lines = [COLUMNS, *map(_cells, locks)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def document(snapshot: Snapshot, locks: list[HeldLock]) -> str:
    """Return the locks and nodes as JSON; its keys are described in docs/commands.md."""
    return json.dumps(
        {
            "version": VERSION,
            "using": snapshot.alias,
            "taken": _iso(snapshot.taken),
            "complete": snapshot.complete,
            "quorum": {
                "nodes": len(snapshot.nodes),
                "answering": snapshot.answering,
                "needed": snapshot.rules.needed,
                "met": snapshot.has_quorum,
            },
            "nodes": [asdict(node) for node in snapshot.nodes],
            "locks": [_entry(lock) for lock in locks],
        },
        indent=2,
    )


def _cells(lock: HeldLock) -> tuple[str, ...]:
    return (
        printable(lock.name),
        str(lock.state.label),
        "-" if lock.remaining is None else f"{lock.remaining:.1f} s",
        f"{lock.votes}/{lock.nodes}",
        printable(str(lock.owner)) if lock.owner else "(another program)",
        "-" if lock.since is None else datetime.fromtimestamp(lock.since).strftime("%Y-%m-%d %H:%M:%S"),
        str(lock.fencing_token or "-"),
    )


def _entry(lock: HeldLock) -> dict[str, Any]:
    return {
        "name": lock.name,
        "state": lock.state.value,
        "remaining": None if lock.remaining is None else round(lock.remaining, 3),
        "ttl": lock.ttl,
        "votes": lock.votes,
        "nodes": lock.nodes,
        "fencing_token": lock.fencing_token or None,
        "fingerprint": lock.fingerprint,
        "since": _iso(lock.since),
        "holder": _holder(lock),
        "views": [
            {
                "node": view.node,
                "answered": view.answered,
                "fingerprint": view.fingerprint or None,
                "remaining": view.left if view.fingerprint else None,
            }
            for view in lock.views
        ],
    }


def _holder(lock: HeldLock) -> dict[str, Any] | None:
    owner = lock.owner
    if owner is None:
        return None
    return {"kind": owner.kind, "label": owner.label, "ref": owner.ref, "host": owner.host, "pid": owner.pid}


def _iso(moment: float | None) -> str | None:
    return None if moment is None else datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")
