"""Delete keys that no live holder needs."""

import sys
import time
from collections import Counter
from typing import Any

from django.core.management.base import CommandError, CommandParser, no_translations

from ...conf import DEFAULT_ALIAS
from ...inventory import ActionResult, Snapshot, StaleKey, Staleness, absurd_tokens, printable, remove_stale, stale_keys
from ..output import NO_QUORUM, OperatorCommand, agreed, deletion, listing, positive, warn

PARTIAL = 1


class Command(OperatorCommand):
    """``manage.py redlock_clear``."""

    help = (
        "Delete stale keys: without expiry, with more than any lease, in a foreign format, or left on too few nodes; "
        "and replace absurd fencing tokens. "
        "What a living process may hold is never touched; an orphaned lock ends by itself. "
        "Exits with 1 when a key could "
        "not be deleted, with 3 when too few nodes answer."
    )
    stealth_options = ("stdin",)

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument("--using", default=DEFAULT_ALIAS, metavar="ALIAS", help="Alias in REDLOCK.")
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="Only report what would be deleted. The default when nobody can be asked, unless --no-input is given.",
        )
        parser.add_argument(
            "--noinput", "--no-input", action="store_false", dest="interactive", help="Delete without asking."
        )
        parser.add_argument(
            "--name",
            action="append",
            dest="names",
            metavar="NAME",
            help="Look at this lock instead of those that the nodes list, which another program's keys are not among; "
            "may be repeated.",
        )
        parser.add_argument(
            "--older-than",
            type=positive,
            metavar="SECONDS",
            help="Only keys whose holder took them at least so long ago; those that do not say are left alone.",
        )

    @no_translations
    def handle(
        self,
        *,
        using: str,
        dry_run: bool,
        interactive: bool,
        names: list[str] | None,
        older_than: int | None,
        **options: Any,
    ) -> None:
        """Show what is stale and why, ask for confirmation, and delete it."""
        snapshot = listing(using, names)
        warn(self, snapshot)
        if not snapshot.has_quorum:
            raise CommandError("Too few nodes answer to say what is stale.", returncode=NO_QUORUM)
        keys = [key for key in self._stale(snapshot, searched=not names) if _old_enough(key, older_than)]
        for key in keys:
            self.stdout.write(_explanation(key))
        if not keys:
            self.stdout.write("Nothing is stale.")
        elif self._may_delete(len(keys), dry_run, interactive, options.get("stdin", sys.stdin)):
            self._delete(keys)

    def _stale(self, snapshot: Snapshot, searched: bool) -> list[StaleKey]:
        """Return the stale keys; if nodes are *searched*, include absurd tokens of locks that nobody holds."""
        keys = stale_keys(snapshot)
        if searched:
            known = {key.lock.slug for key in keys if key.reason is Staleness.ABSURD}
            found = absurd_tokens(snapshot.alias)
            keys += [key for key in stale_keys(found) if key.reason is Staleness.ABSURD and key.lock.slug not in known]
            if found.unsearched:
                text = f"Not all fencing tokens of free locks were read on {', '.join(found.unsearched)}."
                self.stderr.write(text, self.style.WARNING)
        return keys

    def _may_delete(self, count: int, dry_run: bool, interactive: bool, stdin: Any) -> bool:
        if dry_run or (interactive and not stdin.isatty()):
            hint = "" if dry_run else " Nobody is there to ask: use --no-input to delete."
            self.stdout.write(f"Dry run: {_keys(count)} would be deleted.{hint}")
            return False
        if interactive and not agreed(f"Delete {_keys(count)}?"):
            raise CommandError("Nothing was deleted.")
        return True

    def _delete(self, keys: list[StaleKey]) -> None:
        outcomes: Counter[ActionResult] = Counter()
        for key in keys:
            outcome, name = remove_stale(key), printable(key.lock.name)
            outcomes[outcome] += 1
            if outcome is ActionResult.CHANGED:
                self.stdout.write(f"{name}: left alone, because it changed meanwhile.")
            if outcome is ActionResult.FAILED:
                typed = key.reason is Staleness.WRONG_TYPE
                hint = f" Delete it there: {deletion(key.lock)}" if typed else ""
                self.stderr.write(f"{name}: a node that has it did not delete it.{hint}", self.style.ERROR)
        self.stdout.write(self.style.SUCCESS(f"Deleted {_keys(outcomes[ActionResult.REMOVED])}."))
        if outcomes[ActionResult.FAILED]:
            raise CommandError(
                f"{_keys(outcomes[ActionResult.FAILED])} could not be deleted everywhere.", returncode=PARTIAL
            )


def _old_enough(key: StaleKey, older_than: int | None) -> bool:
    return older_than is None or (key.since is not None and time.time() - key.since >= older_than)


def _explanation(key: StaleKey) -> str:
    holder = f" Holder: {printable(str(key.owner))}." if key.owner else ""
    return f"{printable(key.lock.name)} on {', '.join(key.nodes)}: {key.reason.label}.{holder}"


def _keys(count: int) -> str:
    return "1 key" if count == 1 else f"{count} keys"
