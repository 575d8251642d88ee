"""Show the held locks and the nodes, anew every few seconds."""

import sys
import time
from typing import Any

from django.core.management.base import CommandError, CommandParser, no_translations

from ...conf import DEFAULT_ALIAS
from ...inventory import Snapshot, State
from ..shown import NO_QUORUM, OperatorCommand, listing, seconds, table

CLEAR = "\x1b[H\x1b[2J"
LINES = 40  # locks on a screen


class Command(OperatorCommand):
    """``manage.py redlock_top``."""

    help = "Show the held locks and the nodes, anew every few seconds, until Ctrl-C."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument("--using", default=DEFAULT_ALIAS, metavar="ALIAS", help="Alias in REDLOCK.")
        parser.add_argument("--interval", type=seconds, default=2.0, metavar="SECONDS", help="Default: 2.")
        parser.add_argument("--once", action="store_true", help="Show it once.")

    @no_translations
    def handle(self, *, using: str, interval: float, once: bool, **options: Any) -> None:
        """Show, wait, show again."""
        try:
            while True:
                snapshot = listing(using)
                screen = shown(snapshot)
                self.stdout.write(CLEAR + screen if self._on_screen() and not once else screen)
                self.stdout.flush()  # whoever reads a pipe sees it now
                if once and not snapshot.has_quorum:
                    raise CommandError("Too few nodes answer to say what is held.", returncode=NO_QUORUM)
                if once:
                    return
                time.sleep(interval)
        except KeyboardInterrupt:
            return

    def _on_screen(self) -> bool:
        return hasattr(self.stdout, "isatty") and bool(self.stdout.isatty()) and sys.platform != "win32"


def shown(snapshot: Snapshot) -> str:
    """Return one screen: the nodes in words, how many locks there are of each state, those that end first."""
    counts = {state: sum(lock.state == state for lock in snapshot.locks) for state in State}
    summary = ", ".join(f"{count} {state.label}" for state, count in counts.items() if count) or (
        "nothing held" if snapshot.has_quorum else "unknown"
    )
    taken = time.strftime("%H:%M:%S", time.localtime(snapshot.taken))
    lines = [f"{snapshot.alias} at {taken}: {snapshot.quorum}"]
    lines += [f"Trouble: {snapshot.trouble}."] if snapshot.trouble else []
    more = "" if snapshot.complete else " or more"
    lines += [f"{summary}{more}", "", table(snapshot.locks[:LINES], known=snapshot.has_quorum)]
    hidden = len(snapshot.locks) - LINES
    return "\n".join([*lines, f"... and {hidden}{more} that end later"] if hidden > 0 else lines)
