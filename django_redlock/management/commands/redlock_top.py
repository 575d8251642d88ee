"""Show the held locks and the nodes, refreshed every few seconds."""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from textwrap import wrap
from typing import Any

from django.core.management.base import CommandError, CommandParser, no_translations

from ...core.rules import DEFAULT_ALIAS
from ...inventory import Snapshot, State
from ...inventory.model import urgency
from ..output import NO_QUORUM, OperatorCommand, clipped, listing, seconds

CLEAR = "\x1b[H\x1b[2J"
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"  # the terminal's other screen, which has no lines to scroll back to
LINES = 40  # locks on a screen


def leave(signum: int, frame: object) -> None:
    """End the process in the usual way, so that the terminal gets its first screen back."""
    sys.exit(128 + signum)


class Command(OperatorCommand):
    """``manage.py redlock_top``."""

    help = "Show the held locks and the nodes, anew every few seconds, until Ctrl-C."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument("--using", default=DEFAULT_ALIAS, metavar="ALIAS", help="Alias in REDLOCK.")
        parser.add_argument("--interval", type=seconds, default=2.0, metavar="SECONDS", help="Default: 2.")
        parser.add_argument("--once", action="store_true", help="Show it once.")
        parser.add_argument("--wide", action="store_true", help="Leave out no columns, and cut no names in the middle.")

    @no_translations
    def handle(self, *, using: str, interval: float, once: bool, wide: bool, **options: Any) -> None:
        """Show the locks and the nodes again after each interval, until Ctrl-C."""
        anew = self.stdout.isatty() and sys.platform != "win32" and not once
        if anew:
            with suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, leave)
        try:
            self.stdout.write(ENTER if anew else "", ending="")
            while True:
                snapshot = listing(using)
                width = self.width(wide)
                endless = os.terminal_size((width, sys.maxsize)) if width else None  # its lines may scroll
                size = shutil.get_terminal_size() if anew else endless
                text = self._screen(snapshot, size, wide)
                self.stdout.write(CLEAR + text if anew else text)
                self.stdout.flush()  # the reader of a pipe sees it at once
                if once and not snapshot.has_quorum:
                    raise CommandError("Too few nodes answer to say what is held.", returncode=NO_QUORUM)
                if once:
                    return
                time.sleep(interval)
        except KeyboardInterrupt:
            return
        finally:
            self.stdout.write(LEAVE if anew else "", ending="")

    def _screen(self, snapshot: Snapshot, size: os.terminal_size | None, wide: bool) -> str:
        """
        Return one screen: the nodes in words, the number of locks in each state, and the locks in the worst states.

        Args:
            snapshot: A listing.
            size: The size of the screen; locks that do not fit are left out. None cuts no lines.
            wide: Whether the table keeps all columns and cuts no names.
        """
        counts = {state: sum(lock.state == state for lock in snapshot.locks) for state in State}
        summary = ", ".join(f"{count} {state.label}" for state, count in counts.items() if count) or (
            "nothing held" if snapshot.has_quorum else "unknown"
        )
        taken = time.strftime("%H:%M:%S", time.localtime(snapshot.taken))
        lines = [f"{snapshot.alias} at {taken}: {snapshot.quorum}"]
        lines += [f"Trouble: {snapshot.trouble}."] if snapshot.trouble else []
        more = " or more" if snapshot.cut_short else ""
        lines += [f"{summary}{more}"]
        lines = [*(part for line in lines for part in (wrap(line, size.columns) if size else [line])), ""]
        room = min(LINES, max(1, size.lines - len(lines) - 3)) if size else LINES  # 3: titles, last line, cursor
        worst = sorted(snapshot.locks, key=urgency)
        lines += self.table(worst[:room], snapshot, wide).split("\n")
        hidden = len(snapshot.locks) - room
        lines += [f"... and {hidden}{more} that are no worse"] if hidden > 0 else []
        return "\n".join(clipped(line, size.columns) for line in lines) if size else "\n".join(lines)
