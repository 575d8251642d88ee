"""Take locks away from whoever holds them, politely or by force."""

import time
from typing import Any

from django.core.management.base import CommandError, CommandParser, no_translations

from ...core.names import named
from ...core.rules import DEFAULT_ALIAS
from ...exceptions import printable
from ...inventory import ActionResult, LockReport, ask_to_stop, find_locks, force_release
from ...inventory.actions import MAX_RELEASE, still_held
from ...runtime.clock import steady
from ...singleton.handle import celery_task
from ..output import (
    MISUSED,
    NO_QUORUM,
    OperatorCommand,
    deletion_hint,
    holder,
    listing,
    matching,
    remaining,
    seconds,
    status,
)

CHANGED = 4  # exit code: somebody else holds one of the locks now
NOT_REVOKED = 5  # exit code: the broker did not accept the request
EVERY = 0.5  # seconds between two queries for a lock whose holder was asked to stop
RELEASED, GONE, CHANGED_HANDS = ActionResult.RELEASED, ActionResult.GONE, ActionResult.CHANGED


class Command(OperatorCommand):
    """``manage.py redlock_release``."""

    help = (
        "Release held locks, whoever holds them: exactly the holders that are shown. A holder learns of it at its next "
        "renewal or, if nobody renews its lock, when it asks the nodes; until then it may go on. Exits with 3 when too "
        "few nodes answer, 4 when a lock changed hands, 5 when a task could not be revoked."
    )
    stealth_options = ("stdin",)

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument("names", nargs="*", metavar="NAME", help="The locks' names.")
        parser.add_argument(
            "--match", metavar="GLOB", help="Instead of names: a pattern that they match, such as 'orders:*'."
        )
        parser.add_argument("--using", default=DEFAULT_ALIAS, metavar="ALIAS", help="Alias in REDLOCK.")
        parser.add_argument("--fingerprint", help="Only if the holder is this one, as redlock_inspect shows it.")
        parser.add_argument(
            "--polite",
            type=seconds,
            metavar="SECONDS",
            help="Ask the holders to stop first, and wait this long for them to release the locks themselves.",
        )
        parser.add_argument("--revoke-task", action="store_true", help="Revoke the Celery tasks that hold them.")
        parser.add_argument(
            "--terminate-task", action="store_true", help="Revoke the tasks, and end the processes that run them."
        )
        parser.add_argument("--reason", default="", help="For the log.")
        self.add_confirmation(parser, "release", "Only report what would be released.")

    @no_translations
    def handle(
        self,
        *,
        names: list[str],
        match: str | None,
        using: str,
        fingerprint: str | None,
        polite: float | None,
        revoke_task: bool,
        terminate_task: bool,
        reason: str,
        **options: Any,
    ) -> None:
        """Show the locks, ask for confirmation, and release them."""
        self.done = "nothing was released"
        if bool(names) == bool(match):
            both = " Not both." if names else ""
            raise CommandError(f"Name the locks, or choose them with --match.{both}", returncode=MISUSED)
        snapshot = listing(using, names or None)
        self.warn(snapshot, "what is held")
        locks = matching(snapshot, match)
        if len(locks) > MAX_RELEASE:
            text = f"{len(locks)} locks match; at most {MAX_RELEASE} are released at a time. Choose fewer."
            raise CommandError(text, returncode=MISUSED)
        self._show(locks, fingerprint)
        seen = [lock for lock in locks if fingerprint in (None, lock.fingerprint)]
        count = "1 lock" if len(seen) == 1 else f"{len(seen)} locks"
        if seen and self.confirmed("release", f"Release {count}", f"{count} would be released", **options):
            reason = printable(reason[:200])
            asked = self._ask(seen, polite) if polite else {}
            revoked = [self._revoke(lock, terminate_task) for lock in seen if revoke_task or terminate_task]
            outcomes: set[ActionResult] = set()
            first: dict[str, str] = {}  # by holder, the first of its names that were released
            stands = "".join(self.done.partition("; ")[1:])
            for number, lock in enumerate(seen, start=1):
                released = asked.get(lock.slug, False)
                outcome = RELEASED if released else force_release(lock, lock.fingerprint, reason=reason)
                self.done = f"{number} of {count} handled for certain, redlock_list shows the others{stands}"
                if (outcome is GONE and revoked) or (outcome in (GONE, CHANGED_HANDS) and lock.slug in asked):
                    outcome = RELEASED  # the holder released it
                style = self.style.SUCCESS if outcome is RELEASED else self.style.ERROR
                hint = deletion_hint(lock) if outcome is ActionResult.WRONG_TYPE else ""
                self.stdout.write(style(f"{printable(lock.name)}: {OUTCOME_TEXTS[outcome]}{hint}"))
                outcomes.add(outcome)
                if outcome is RELEASED:
                    first.setdefault(lock.fingerprint, printable(lock.name))
            for owner, left in still_held(first, using).items():
                text = f"still has {printable(named(left))}, until its lease or its minimum hold ends."
                self.stdout.write(self.style.WARNING(f"The holder of {first[owner]} {text}"))
            _conclude(outcomes, all(revoked))
        elif locks and not seen and not options["dry_run"]:
            raise CommandError("Nothing was released: the holder has changed.", returncode=CHANGED)

    def _show(self, locks: list[LockReport], fingerprint: str | None) -> None:
        for lock in locks:
            other = "" if fingerprint in (None, lock.fingerprint) else " Left alone: it has another holder."
            known = "" if lock.remaining is None else " left"
            about = f"{status(lock)}, {remaining(lock)}{known}, held by {holder(lock)}, {lock.fingerprint}"
            self.stdout.write(f"{printable(lock.name)}: {about}.{other}")
        if not locks:
            self.stdout.write("Nothing is held.")

    def _ask(self, locks: list[LockReport], grace: float) -> dict[str, bool]:
        """
        Ask the holders to stop, and wait until they have stopped or *grace* has passed.

        Returns:
            Whether each lock has been released by now whose holder was asked, by the lock's slug.
        """
        waiting: dict[str, LockReport] = {}
        for lock in locks:
            outcome = ask_to_stop(lock, lock.fingerprint)
            if outcome is ActionResult.ASKED:
                waiting[lock.slug] = lock
                count = "1 holder was" if len(waiting) == 1 else f"{len(waiting)} holders were"
                self.done = f"nothing was released by force; {count} asked to stop, and the request stands"
            self.stdout.write(f"{printable(lock.name)}: {ASKED.get(outcome) or OUTCOME_TEXTS[outcome]}")
        asked, until = list(waiting), steady() + grace
        while waiting and steady() < until:
            time.sleep(min(EVERY, max(0.0, until - steady())))
            snapshot = find_locks(list(waiting), locks[0].alias)
            held = {lock.slug: lock for lock in snapshot.locks}
            for slug, lock in list(waiting.items()):
                views = held[slug].views if slug in held else ()
                if snapshot.has_quorum and all(view.fingerprint != lock.fingerprint for view in views):
                    del waiting[slug]
        return {slug: slug not in waiting for slug in asked}

    def _revoke(self, lock: LockReport, terminate: bool) -> bool:
        """Revoke the task that holds a lock; return False if the request did not reach the workers."""
        ref = celery_task(lock.owner)
        if not ref:
            self.stderr.write(f"{printable(lock.name)}: not held by a Celery task.", self.style.WARNING)
            return True
        from ...celery.handle import revoke  # only here: Celery is optional

        name, task = printable(lock.name), printable(ref)
        try:
            revoke(ref, terminate=terminate)
        except Exception as error:  # from any broker's client, or from its settings
            text = f"{name}: the workers could not be told to revoke task {task}: {type(error).__name__}."
            self.stderr.write(text, self.style.ERROR)
            return False
        self.stdout.write(f"{name}: told the workers to revoke task {task}.")
        return True


ASKED = {
    ActionResult.ASKED: "its holder was asked to stop.",
    ActionResult.SHARED: "several hold it; they cannot be asked.",
    ActionResult.FOREIGN: "another program holds it; it cannot be asked.",
    ActionResult.UNRENEWED: "nobody renews it; its holder cannot be asked.",
}
OUTCOME_TEXTS = {
    ActionResult.RELEASED: "released.",
    ActionResult.CHANGED: "not released: it changed hands.",
    ActionResult.GONE: "nobody holds it any more.",
    ActionResult.UNKNOWN: "too few nodes answered to tell whether it is free.",
    ActionResult.WRONG_TYPE: "not released: its key is not a string, so another program wrote it.",
}


def _conclude(outcomes: set[ActionResult], revoked: bool) -> None:
    if ActionResult.UNKNOWN in outcomes:
        raise CommandError("Too few nodes answered.", returncode=NO_QUORUM)
    if ActionResult.CHANGED in outcomes:
        raise CommandError("Not all were released.", returncode=CHANGED)
    if ActionResult.WRONG_TYPE in outcomes:
        raise CommandError("Not all were released.")
    if not revoked:
        raise CommandError("Not all tasks could be revoked.", returncode=NOT_REVOKED)
