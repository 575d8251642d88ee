"""Run a program under a lock."""

import os
import signal
import sys
from argparse import PARSER, ArgumentTypeError
from math import inf
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ...conf import InvalidRedlockError
from ...core.rules import DEFAULT_ALIAS
from ...engine.lease import Lease
from ...engine.manager import owner_here
from ...handler import locks
from .. import locked
from ..output import INTERRUPTED, duration_in, seconds
from ..process_group import Child, passed_on

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells report them
GRACE = 10.0  # seconds


class Command(BaseCommand):
    """Run a program while holding a lock, and end the program when the lock is lost."""

    help = (
        "Run a program under a lock, for cron on several servers: manage.py redlock_run nightly -- backup --all. "
        "Exits with the program's code; 75 if the lock is taken, 69 if too few nodes answer, 76 if it was lost."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Define the options."""
        parser.usage = "%(prog)s [options] name -- program [argument ...]"
        parser.add_argument("name", help="the lock's name")
        # PARSER: all that follows the program is the program's. With "+", argparse drops two dashes from its arguments.
        parser.add_argument("program", nargs=PARSER, help="what to run, behind two dashes; with its arguments")
        parser.add_argument("--using", default=DEFAULT_ALIAS, metavar="ALIAS", help="alias in REDLOCK")
        parser.add_argument("--ttl", type=seconds, metavar="SECONDS", help='length of the lease; OPTIONS["ttl"]')
        parser.add_argument(
            "--wait", type=waiting, default=0.0, metavar="SECONDS", help="how long to try, or 'forever'; 0"
        )
        parser.add_argument(
            "--max-hold",
            type=holding,
            metavar="SECONDS",
            help="how long to renew it, or 'forever'; OPTIONS[\"max_hold\"], an hour",
        )
        parser.add_argument(
            "--hold-for",
            type=duration_in,
            default=0.0,
            metavar="SECONDS",
            help="how long it stays taken at least, from its acquisition, however the program ends; 0",
        )
        parser.add_argument(
            "--no-hold-on-error",
            action="store_false",
            dest="hold_on_error",
            help="free it at once if the program's exit code is not 0",
        )
        parser.add_argument(
            "--grace", type=duration_in, default=GRACE, metavar="SECONDS", help=f"from SIGTERM to SIGKILL; {GRACE:g}"
        )
        parser.add_argument(
            "--skip-exit-code", type=exit_code, default=locked.SKIPPED, metavar="CODE", help="if it is taken; 75"
        )

    def handle(
        self, *, name: str, program: list[str], using: str, skip_exit_code: int, grace: float, **options: Any
    ) -> None:
        """Take the lock, run the program, and exit with its code."""
        if os.name != "posix":
            raise CommandError("redlock_run needs process groups and signals, which this system does not have.")
        if program[0] == "--" and len(program) > 1:  # some versions of argparse leave these dashes behind an option
            program = program[1:]
        label = Path(program[0]).name  # without the arguments, which may hold a secret
        chosen = {key: options[key] for key in ("ttl", "wait", "max_hold", "hold_for", "hold_on_error")}
        try:
            lock = locks[using].on_behalf(name, owner_here("command", label), **chosen)
            lease = locked.acquire(lock, skip_exit_code)
        except (InvalidRedlockError, ValueError) as error:
            raise CommandError(str(error)) from None
        except KeyboardInterrupt:
            self.stderr.write("")  # the terminal has shown ^C
            text = f"Interrupted while it waited for the lock {name!r}: {label!r} did not run."
            raise CommandError(text, returncode=INTERRUPTED) from None
        if lease is None:
            return
        try:
            code = _run(program, lease, grace)
            if not lease.valid():
                message = f"Ended {label!r} (exit code {code}), because {locked.explain(lease)}."
                raise CommandError(message, returncode=locked.LOST)
            if code:
                lease.hold.failed()
        except BaseException:
            lease.hold.failed()
            lease.release()
            raise
        locked.give_up(lease)
        if code == INTERRUPTED and getattr(self, "_called_from_command_line", False):
            _die_of_interrupt()
        if code:
            sys.exit(code)


def _die_of_interrupt() -> None:
    """End this process as Ctrl-C ended the program, because a shell ends its script only then."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _run(program: list[str], lease: Lease, grace: float) -> int:
    """Run the program until it ends or the lease is lost; return its exit code."""
    env = {**os.environ, "REDLOCK_NAME": lease.name, "REDLOCK_FENCING_TOKEN": str(lease.fencing_token)}
    with passed_on() as pass_to:
        try:
            child = Child(program, grace=grace, env=env)
        except OSError as error:
            lease.hold.never_began()  # the work does not begin: another host may have the program
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            raise CommandError(f"Cannot run {program[0]!r}: {error.strerror}.", returncode=code) from None
        except ValueError as error:  # a null character, which no command line can have
            lease.hold.never_began()
            raise CommandError(f"Cannot run {program[0]!r}: {error}.") from None
        except RuntimeError as error:
            raise CommandError(f"Ended {program[0]!r}: {error}") from None
        pass_to(child)
        lease.on_lost(lambda lease: child.end())
        code = child.wait(lease.valid)
    if child.is_out_of_reach and not lease.valid():
        label = Path(program[0]).name
        text = f"Could not end {label!r}, which belongs to another user, although {locked.explain(lease)}. "
        raise CommandError(f"{text}It went on until its own end (exit code {code}).", returncode=locked.LOST)
    return code


def waiting(text: str) -> float | None:
    """Return the number of seconds in the text of an option, which may be 0, or None for ``forever``."""
    return None if text == "forever" else duration_in(text)


def holding(text: str) -> float:
    """Return the number of seconds in the text of an option; infinity for ``forever``."""
    return inf if text == "forever" else seconds(text)


def exit_code(text: str) -> int:
    """Return the exit code in the text of an option."""
    if not text.isdecimal() or int(text) > 255:
        raise ArgumentTypeError(f"must be an exit code from 0 to 255, not {text!r}")
    return int(text)
