"""Report the problems of the nodes, their possible consequences, and the remedies."""

import json
from typing import Any

from django.apps import apps
from django.core.management.base import CommandError, CommandParser, no_translations
from django.db import DatabaseError

from ...conf import InvalidRedlockError, aliases, read_alias
from ...exceptions import printable
from ...inventory.doctor import Diagnosis, diagnose
from ...inventory.node_checks import severity
from ...nodes.inspection import Inspection, Level
from ..output import MISUSED, OperatorCommand, seconds

VERSION = 1  # of the JSON document; increased when a key is removed or changes its meaning
STYLES = {Level.NOTE: "NOTICE", Level.WARNING: "WARNING", Level.ERROR: "ERROR"}
NO_LEVEL = "never"  # the command does not fail


class Command(OperatorCommand):
    """``manage.py redlock_doctor``."""

    help = (
        "Examine every node: whether it can be reached, may vote, keeps its data and time, grants all rights, and "
        "takes a lock. Exits with 0 unless there are errors, and with 2 if there are."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument(
            "--using", action="append", metavar="ALIAS", help="Alias in REDLOCK; may be repeated. Default: all."
        )
        parser.add_argument("--format", default="text", choices=("text", "json"), help="Default: text.")
        parser.add_argument(
            "--fail-level",
            default="error",
            choices=(str(Level.WARNING), str(Level.ERROR), NO_LEVEL),
            help="The lowest level that makes the command fail: with 1 for warnings, 2 for errors. Default: error.",
        )
        parser.add_argument(
            "--advise",
            action="store_true",
            help="Report what the history of locks suggests for ttl and wait; needs django_redlock.contrib.history.",
        )
        parser.add_argument(
            "--timeout", type=seconds, default=1.0, metavar="SECONDS", help="For each answer of a node. Default: 1."
        )

    @no_translations
    def handle(
        self,
        *,
        using: list[str] | None,
        format: str,
        fail_level: str,
        timeout: float,
        advise: bool,
        **options: Any,
    ) -> None:
        """Inspect the nodes and write the findings."""
        if advise:
            if format == "json":
                raise CommandError("--advise prints text only: leave out --format json.", returncode=MISUSED)
            self._advise(using)
            return
        try:
            found = [diagnose(alias, timeout=timeout) for alias in using or aliases()]
        except InvalidRedlockError as error:
            raise CommandError(f"{error} ({error.code})", returncode=MISUSED) from None
        if format == "json":
            self.stdout.write(document(found))
        else:
            for diagnosis in found:
                self._show(diagnosis)
        worst = max((severity(diagnosis.level) for diagnosis in found), default=0)
        if fail_level != NO_LEVEL and worst >= severity(Level(fail_level)):
            levels = [finding.level for each in found for finding in each.findings]
            counts = [f"{levels.count(each)} {each}" for each in (Level.ERROR, Level.WARNING) if each in levels]
            text = ", ".join(count if count.startswith("1 ") else f"{count}s" for count in counts)
            raise CommandError(f"Not all is well: {text}.", returncode=worst)

    def _advise(self, using: list[str] | None) -> None:
        if not apps.is_installed("django_redlock.contrib.history"):
            raise CommandError(
                "There is no history yet: add 'django_redlock.contrib.history' to INSTALLED_APPS, run migrate, "
                "and try again in a day.",
                returncode=MISUSED,
            )
        from ...contrib.history.models import Hold, kinds  # only here: the app may not be installed

        for alias in using or (None,):
            try:
                if alias is not None:
                    read_alias(alias)  # raises if there is none
                found, since = kinds(alias)
            except InvalidRedlockError as error:
                raise CommandError(f"{error} ({error.code})", returncode=MISUSED) from None
            except DatabaseError as error:
                if Hold._meta.db_table not in str(error):
                    raise
                text = f"The history cannot be read ({error}): type manage.py migrate {Hold._meta.app_label}"
                raise CommandError(text, returncode=MISUSED) from None
            if since:
                self.stdout.write(f"Only the latest locks, since {since.isoformat(' ', 'minutes')}:")
            for kind in found:
                times = f", {kind.hold[0]:.2f} s (median), {kind.hold[1]:.2f} s (99 of 100)" if kind.holds else ""
                self.stdout.write(
                    f"{kind.template}: held {kind.holds} times{times}; waited {kind.wait[0]:.2f} s, "
                    f"{kind.wait[1]:.2f} s; {kind.refused} gave up, {kind.lost} lost."
                )
                for text in kind.suggestions:
                    self.stdout.write(self.style.WARNING(f"    {text}"))

    def _show(self, diagnosis: Diagnosis) -> None:
        count = len(diagnosis.nodes)
        self.stdout.write(self.style.MIGRATE_HEADING(f"{diagnosis.alias}: {count} node{'s' if count > 1 else ''}"))
        for node in diagnosis.nodes:
            self.stdout.write(f"  {printable(summary(node))}")
        for finding in diagnosis.findings:
            where = f"{finding.node}: " if finding.node else ""
            what = getattr(self.style, STYLES[finding.level])(f"{finding.level.upper()} {finding.id}")
            self.stdout.write(f"\n{what}  {printable(where + finding.text)}\n    Remedy: {finding.remedy}")
        if not diagnosis.findings:
            text = "  All is well: a lock was taken, extended and released on each node."
            self.stdout.write(self.style.SUCCESS(text))


def summary(node: Inspection) -> str:
    """Describe a node in one line."""
    if node.detail:
        return f"{node.name}: {node.detail}"
    if node.store:
        return f"{node.name}: {node.store}, round trip {node.round_trip * 1000:.1f} ms"
    if not node.known:
        return f"{node.name}: not a server that can be inspected; it is tested with a lock."
    version, role = node.version or "of unknown version", node.info.get("role", "unknown role")
    serving = "" if node.age is None else f"serving for {node.age:.0f} s, "
    return (
        f"{node.name}: {node.server} {version}, {role}, up {node.number('uptime_in_seconds')} s, {serving}"
        f"round trip {node.round_trip * 1000:.1f} ms, clock {round(node.ahead, 3) + 0.0:+.3f} s"  # no -0.000
    )


def document(found: list[Diagnosis]) -> str:
    """Return the diagnoses as JSON; its keys are described in docs/operate/doctor.md."""
    return json.dumps(
        {
            "version": VERSION,
            "level": max((each.level for each in found), key=severity, default=None) or "ok",
            "aliases": [
                {
                    "using": each.alias,
                    "level": each.level or "ok",
                    "nodes": [
                        {
                            "name": node.name,
                            "detail": node.detail,
                            "round_trip": round(node.round_trip, 6),
                            "clock": round(node.ahead, 6),
                            "version": node.version or None,
                            "role": node.info.get("role"),
                            "uptime": node.number("uptime_in_seconds"),
                            "age": None if node.age is None else round(node.age, 3),
                        }
                        for node in each.nodes
                    ],
                    "findings": [finding._asdict() for finding in each.findings],
                }
                for each in found
            ],
        },
        indent=2,
    )
