"""Delete keys that no live holder needs."""

import time
from collections import defaultdict
from typing import Any

from django.core.management.base import CommandError, CommandParser, no_translations

from ...core.rules import DEFAULT_ALIAS
from ...exceptions import printable
from ...inventory import ActionResult, StaleKey, Staleness, State, remove_stale, stale_keys
from ..output import OperatorCommand, deletion_hint, listing, positive

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
        dry = "Only report what would be deleted. The default when nobody can be asked, unless --no-input is given."
        self.add_confirmation(parser, "delete", dry)
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
    def handle(self, *, using: str, names: list[str] | None, older_than: int | None, **options: Any) -> None:
        """Show what is stale and why, ask for confirmation, and delete it."""
        self.done = "nothing was deleted"
        snapshot = listing(using, names)
        self.warn(snapshot, "what is stale")
        keys = stale_keys(snapshot)
        if older_than is not None:
            latest = time.time() - older_than
            keys = [key for key in keys if key.since is not None and key.since <= latest]
        for key in keys:
            holder = f" Holder: {printable(str(key.owner))}." if key.owner else ""
            self.stdout.write(f"{printable(key.lock.name)} on {', '.join(key.nodes)}: {key.reason.label}.{holder}")
        if not keys:
            self.stdout.write("Nothing is stale.")
            for lock in snapshot.locks:
                if older_than is None and lock.state is State.NO_EXPIRY:
                    self.stdout.write(
                        f"{printable(lock.name)} never ends, but its holder may live, or died less than a lease ago. "
                        "Try again in a minute, or unlock it with redlock_release."
                    )
            return
        planned = _in_words(keys, "{} would be deleted", "{} would be replaced")
        if self.confirmed("delete", _in_words(keys, "delete {}", "replace {}").capitalize(), planned, **options):
            self._delete(keys)

    def _delete(self, keys: list[StaleKey]) -> None:
        outcomes: dict[ActionResult, list[StaleKey]] = defaultdict(list)
        for number, key in enumerate(keys, start=1):
            outcome, name = remove_stale(key), printable(key.lock.name)
            outcomes[outcome].append(key)
            self.done = f"{number} of {len(keys)} handled for certain, redlock_clear shows the others"
            if outcome is ActionResult.CHANGED:
                self.stdout.write(f"{name}: left alone, because it changed meanwhile.")
            if outcome is ActionResult.FAILED:
                hint = deletion_hint(key.lock) if key.reason is Staleness.WRONG_TYPE else ""
                failed = _in_words([key], "delete it", "replace it")
                self.stderr.write(f"{name}: a node that has it did not {failed}.{hint}", self.style.ERROR)
        done = _in_words(outcomes[ActionResult.REMOVED], "deleted {}", "replaced {}")
        self.stdout.write(self.style.SUCCESS(f"{done.capitalize()}."))
        if left := outcomes[ActionResult.FAILED]:
            text = _in_words(left, "{} could not be deleted everywhere", "{} could not be replaced everywhere")
            raise CommandError(f"{text}.", returncode=PARTIAL)


def _in_words(keys: list[StaleKey], deleting: str, replacing: str) -> str:
    """Say what happens to how many keys, and to how many absurd tokens, which are replaced."""
    tokens = sum(key.reason is Staleness.ABSURD for key in keys)
    count = len(keys) - tokens
    parts = [deleting.format("1 key" if count == 1 else f"{count} keys")] if count or not tokens else []
    parts += [replacing.format("1 token" if tokens == 1 else f"{tokens} tokens")] if tokens else []
    return " and ".join(parts)
