"""
Code that the commands share (internal).

It queries locks, converts the texts of options, and shows locks to people and to programs.
"""

import errno
import os
import shutil
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from io import StringIO
from typing import Any
from unicodedata import category, east_asian_width

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ..conf import InvalidRedlockError
from ..exceptions import printable
from ..handler import locks
from ..inventory import LockReport, Snapshot, State, find_locks, held_locks, slugs_of
from ..inventory.model import NO_STRING, deletion, duration, middle

MISUSED = 2  # exit code: an option, a name or the settings cannot be used; argparse exits with 2 as well
NO_QUORUM = 3  # exit code
INTERRUPTED = 130  # exit code, as shells report the end by Ctrl-C
UNREAD = 141  # exit code, as shells report the end by a broken pipe
MOST = 20_000  # locks in one listing: a command has the time to ask for more than a page
LISTING_TIME = 30.0  # seconds that a listing takes at most
VERSION = 1  # of the JSON document; increased when a key is removed or changes its meaning
COLUMNS = ("LOCK", "STATE", "HELD FOR", "WAITING", "REMAINING", "VOTES", "HOLDER", "SINCE", "TOKEN")
CUT = ("HOLDER", "LOCK")  # columns whose cells are cut in the middle
READABLE, LEAST = 16, 12  # columns that a cut name keeps while there are others to leave out, and after that
# The columns that are left out if they do not fit, in this order: first those that must fit beside whole names, then
# those that must fit beside names cut to this length.
LEFT_OUT = {
    **dict.fromkeys(("TOKEN", "SINCE"), sys.maxsize),
    **dict.fromkeys(("REMAINING", "VOTES", "WAITING"), READABLE),
    **dict.fromkeys(("HELD FOR", "STATE", "HOLDER"), LEAST),
}
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class OperatorCommand(BaseCommand):
    """
    A command that shows text written by others, on a terminal or through a pipe.

    Attributes:
        done: What has been changed by now, and what not, in words for somebody who presses Ctrl-C or whose pipe breaks.
    """

    requires_system_checks = ()
    done = ""

    def execute(self, *args: Any, **options: Any) -> str | None:
        """
        Run the command; escape what the output cannot encode.

        When the reader of a pipe is gone, a command that changes nothing ends quietly.
        """
        if os.environ.get("NO_COLOR") and not options.get("force_color"):
            options["no_color"] = True
        if sys.stdout is None and not options.get("stdout"):  # the process was started with it closed
            options["stdout"] = StringIO()
        stream = options.get("stdout") or sys.stdout
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        try:
            printed = super().execute(*args, **options)
            self.done = ""
            stream.flush()
        except BrokenPipeError:
            discard(stream)
            if self.done and not options.get("dry_run"):
                text = f"Nobody reads the output any more: {self.done}."
                raise CommandError(text, returncode=UNREAD) from None
            return None
        except CommandError:
            try:
                stream.flush()
            except OSError:  # at exit it would take the place of this error's exit code
                discard(stream)
            raise
        except KeyboardInterrupt:
            self.stderr.write("")  # the terminal has shown ^C
            text = f"Interrupted: {self.done}." if self.done else "Interrupted."
            raise CommandError(text, returncode=INTERRUPTED) from None
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            raise CommandError(f"The output could not be written: {error.strerror}.") from None
        return printed

    def add_confirmation(self, parser: CommandParser, verb: str, dry: str) -> None:
        """Add the options with which a command only reports what it would do, or does it without asking."""
        parser.add_argument("--dry-run", action="store_true", help=dry)
        without = f"{verb.capitalize()} without asking."
        parser.add_argument("--noinput", "--no-input", action="store_false", dest="interactive", help=without)

    def confirmed(self, verb: str, what: str, planned: str, **options: Any) -> bool:
        """
        Return whether to go on: with ``--no-input``, or after a yes at the terminal.

        Args:
            verb: What would be done, such as "release".
            what: The question, without its mark.
            planned: What a dry run reports.
            options: The options of the command.

        Raises:
            CommandError: The answer was no.
        """
        self.done = f"nothing was {verb.removesuffix('e')}ed"
        dry_run, interactive = options["dry_run"], options["interactive"]
        stdin: Any = options.get("stdin", sys.stdin)
        if dry_run or (interactive and (stdin is None or not stdin.isatty())):  # None if it was closed
            hint = "" if dry_run else f" Nobody is there to ask: use --no-input to {verb}."
            self.stdout.write(f"Dry run: {planned}.{hint}")
            return False
        if interactive and not agreed(f"{what}?"):
            raise CommandError(f"{self.done.capitalize()}.")
        return True

    def warn(self, snapshot: Snapshot, unknown: str) -> None:
        """
        Report on standard error what is missing from a listing.

        Raises:
            CommandError: Too few nodes answer; then nobody can say what *unknown* describes.
        """
        if snapshot.trouble:
            self.stderr.write(f"{snapshot.quorum} Trouble: {snapshot.trouble}.", self.style.WARNING)
        if snapshot.cut_short:
            text = "The list may lack locks. It has those that end first, and up to 50 that never end."
            self.stderr.write(text, self.style.WARNING)
        if snapshot.wrong_type:
            self.stderr.write(snapshot.odd_keys, self.style.WARNING)
        if not snapshot.has_quorum:
            raise CommandError(f"Too few nodes answer to say {unknown}.", returncode=NO_QUORUM)

    def table(self, locks: Iterable[LockReport], snapshot: Snapshot, wide: bool) -> str:
        """
        Return locks as lines of plain text; if there are none, say so only if enough nodes answered.

        Args:
            locks: The locks to show.
            snapshot: The listing that has them.
            wide: Whether lines may be wider than the terminal.
        """
        now, width = time.time(), self.width(wide)
        rows = [tuple(map(self.readable, cells(lock, now))) for lock in locks]  # which changes the length of a name
        if not rows:
            return "No locks." if snapshot.has_quorum else "Unknown: too few nodes answer."
        if not width:
            return columns([COLUMNS, *rows])
        text = columns(fitted([COLUMNS, *rows], width))
        text = text if self.readable("…") == "…" else text.replace("…", "~")  # where a name is cut
        return "\n".join(clipped(line, width) for line in text.split("\n"))

    def readable(self, text: str) -> str:
        """Return a text as this terminal or file shows it; signs that its encoding lacks are escaped."""
        encoding = getattr(self.stdout, "encoding", None) or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)

    def width(self, wide: bool) -> int | None:
        """Return how many characters a line may have; None, for a pipe or with ``--wide``, means any number."""
        return shutil.get_terminal_size().columns if self.stdout.isatty() and not wide else None


def discard(stream: Any) -> None:
    """Let what is still to be written to a broken pipe vanish; Python writes to it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def agreed(question: str) -> bool:
    """Ask on the terminal, and return whether the answer was yes; no answer counts as no."""
    try:
        return input(f"\n{question}\n\n    Type 'yes' to continue, or 'no' to cancel: ") == "yes"
    except EOFError:
        return False


def positive(text: str) -> int:
    """Return the whole number from 1 in the text of an option."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return number


def seconds(text: str) -> float:
    """Return the positive number of seconds in the text of an option."""
    number = duration_in(text)
    if not number:
        raise ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return number


def duration_in(text: str) -> float:
    """Return the number of seconds in the text of an option, which may be 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e9:
        raise ArgumentTypeError(f"must be a number of seconds, not {text!r}")
    return number


def listing(using: str, names: list[str] | None = None) -> Snapshot:
    """Return the held locks of an alias, or only the named ones; report a bad alias or name as a CommandError."""
    try:
        if names:
            return find_locks([slug for name in names for slug in slugs_of(name)], using)
        return held_locks(using, limit=MOST, seconds=LISTING_TIME)
    except (InvalidRedlockError, ValueError) as error:
        raise CommandError(str(error), returncode=MISUSED) from None


def matching(snapshot: Snapshot, match: str | None) -> list[LockReport]:
    """Return the locks whose names match a glob, in the order of the snapshot; all of them without one."""
    return [lock for lock in snapshot.locks if match is None or fnmatchcase(lock.name, match)]


def fitted(lines: list[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """
    Return lines of cells that fit a terminal.

    The least important columns are left out, then names are cut, and then further columns are left out: who holds a
    lock, for how long, who waits and on how many nodes is worth more than the whole of a long name.
    """
    for title, least in LEFT_OUT.items():
        if _width(_shortened(lines, 0, least)) > width:
            column = lines[0].index(title)
            lines = [(*line[:column], *line[column + 1 :]) for line in lines]
    return _shortened(lines, width, LEAST)


def _shortened(lines: list[tuple[str, ...]], width: int, least: int) -> list[tuple[str, ...]]:
    """Return the lines with holders and names cut as far as *width* demands; the longest first, to *least* at most."""
    columns = [lines[0].index(title) for title in CUT if title in lines[0]]
    room = {column: max(columns_of(line[column]) for line in lines) for column in columns}
    excess = _width(lines) - width
    while excess > 0 and max(room.values()) > least:
        room[max(columns, key=room.__getitem__)] -= 1
        excess -= 1
    return [tuple(_cut(cell, room.get(column, columns_of(cell))) for column, cell in enumerate(line)) for line in lines]


def columns_of(text: str) -> int:
    """Return how many terminal columns a text takes: wide characters such as Chinese take two, accents none."""
    if text.isascii():
        return len(text)
    return sum(2 if east_asian_width(char) in "WF" else category(char) not in ("Mn", "Me") for char in text)


def clipped(text: str, width: int) -> str:
    """Return as much of the beginning of a text as fits a number of columns."""
    return _cut(text, width, lambda text, length: text[:length])


def _cut(text: str, room: int, part: Callable[[str, int], str] = middle) -> str:
    if columns_of(text) <= room:
        return text
    length = room
    while columns_of(short := part(text, length)) > room:
        length -= 1
    return short


def _width(lines: list[tuple[str, ...]]) -> int:
    return sum(max(map(columns_of, column)) + 2 for column in zip(*lines, strict=True)) - 2


def columns(lines: list[tuple[str, ...]]) -> str:
    """Return lines of cells as text with aligned columns."""
    widths = [max(columns_of(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell + " " * (width - columns_of(cell)) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def cells(lock: LockReport, now: float) -> tuple[str, ...]:
    """Return a lock's row in a table."""
    held = lock.held_for(now)
    return (
        printable(lock.name),
        status(lock),
        "-" if held is None else duration(held),
        str(lock.waiting or "-"),
        remaining(lock),
        f"{lock.votes}/{lock.nodes}",
        holder(lock),
        local(lock.since),
        str(lock.fencing_token or "-"),
    )


def deletion_hint(lock: LockReport) -> str:
    """Return what to type where another program wrote the key of a lock, which no node of ours can delete."""
    seen = zip(locks[lock.alias].nodes, lock.views, strict=False)
    odd = [node for node, view in seen if view.fingerprint == NO_STRING and hasattr(node, "holder_key")]
    keys = dict.fromkeys(node.holder_key(lock.slug) for node in odd)  # a cluster has other keys than its neighbours
    return f" Delete it there: {' or '.join(map(deletion, keys))}" if keys else ""


def holder(lock: LockReport) -> str:
    """Describe the holder of a lock for people."""
    return lock.holder or "(another program)"


def status(lock: LockReport) -> str:
    """Return the state of a lock for people, and until when it stays taken although its work is over."""
    return lock.status(clock(lock.kept_until) if lock.kept_until else "")


def remaining(lock: LockReport) -> str:
    """Return for how long a lock is held unless its holder extends it, for people."""
    if lock.remaining is None:
        return "never ends" if lock.state is State.NO_EXPIRY else "-"
    return f"{lock.remaining:.1f} s"


def clock(moment: float) -> str:
    """Format a moment that is near in this machine's local time: without the date if it is today."""
    date, _, time = local(moment).partition(" ")
    return time if date == f"{datetime.now():%Y-%m-%d}" else f"{date} {time}"


def local(moment: float | None) -> str:
    """Format a moment in this machine's local time, for people."""
    return "-" if moment is None else datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")


def entry(lock: LockReport) -> dict[str, Any]:
    """Return a lock's entry in a JSON document."""
    owner = lock.owner
    return {
        "name": lock.name,
        "state": lock.state.value,
        "held_until": iso(lock.kept_until or None),
        "remaining": None if lock.remaining is None else round(lock.remaining, 3),
        "ttl": lock.ttl,
        "votes": lock.votes,
        "nodes": lock.nodes,
        "extensions": lock.extensions,
        "fencing_token": lock.fencing_token or None,
        "fingerprint": lock.fingerprint,
        "since": iso(lock.since),
        "holder": owner
        and {
            "kind": owner.kind,
            "label": owner.work,
            "ref": owner.ref,
            "host": owner.host or None,  # unknown for a shared lock, like the next
            "pid": owner.pid or None,
            "sharers": lock.sharers or None,
        },
        "views": [
            {
                "node": view.node,
                "answered": view.answered,
                "fingerprint": view.fingerprint or None,
                "remaining": view.left if view.fingerprint else None,
                "fencing_token": view.fence or None,
            }
            for view in lock.views
        ],
    }


def iso(moment: float | None) -> str | None:
    """Format a moment for programs."""
    return None if moment is None else datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")
