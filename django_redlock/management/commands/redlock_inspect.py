"""Show everything that is known about one lock: what each node has, who holds the lock, and who waits for it."""

import json
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from django.core.management.base import CommandError, CommandParser, no_translations
from django.utils.module_loading import import_string

from ...core.rules import DEFAULT_ALIAS
from ...exceptions import printable
from ...inventory import LockReport, Snapshot, View, stale_keys
from ...inventory.model import described, duration
from ...singleton.handle import explain_call
from ...singleton.slot import SlotState
from ..output import (
    MISUSED,
    NO_QUORUM,
    VERSION,
    OperatorCommand,
    columns,
    entry,
    holder,
    iso,
    listing,
    local,
    remaining,
    status,
)

FREE = 1


class Command(OperatorCommand):
    """``manage.py redlock_inspect``."""

    help = (
        "Show what each node has of one lock, who holds it and who waits for it. Exits with 0 if it is held, 1 if it "
        "is free, 2 when it cannot be asked for, 3 when too few nodes answer."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument("name", nargs="?", help="The lock's name.")
        parser.add_argument("--task", metavar="TASK", help="Explain a call of this singleton task instead.")
        parser.add_argument("--args", dest="given", default="[]", metavar="JSON", help="The call's arguments, a list.")
        parser.add_argument(
            "--kwargs", dest="named", default="{}", metavar="JSON", help="The call's keyword arguments, an object."
        )
        parser.add_argument("--using", default=DEFAULT_ALIAS, metavar="ALIAS", help="Alias in REDLOCK.")
        parser.add_argument("--format", default="text", choices=("text", "json"), help="Default: text.")

    @no_translations
    def handle(self, *, name: str | None, using: str, format: str, task: str | None, **options: Any) -> None:
        """Query the nodes for the lock and write what they report."""
        if task:
            if name is not None or format == "json" or using != DEFAULT_ALIAS:
                raise CommandError(
                    "--task explains a call in text, and the task itself determines the alias: leave out the name, "
                    "--format and --using.",
                    returncode=MISUSED,
                )
            return self._explain(task, options["given"], options["named"])
        if name is None:
            text = "Say which lock, redlock_inspect NAME, or which call, redlock_inspect --task TASK."
            raise CommandError(text, returncode=MISUSED)
        if (options["given"], options["named"]) != ("[]", "{}"):
            text = f"--args and --kwargs belong to a call: write --task TASK instead of {printable(name)}."
            raise CommandError(text, returncode=MISUSED)
        snapshot = listing(using, [name])
        if format == "json":
            self.stdout.write(document(snapshot, name))
        else:
            self._show(snapshot, name)
        self.warn(snapshot, "whether it is held")
        if not snapshot.locks:
            raise CommandError(f"{printable(name)} is free.", returncode=FREE)

    def _explain(self, task: str, args: str, kwargs: str) -> None:
        """Write what is known about the slot of a singleton task's call."""
        try:
            found = explain_call(find(task), args, kwargs)
        except RecursionError:
            raise CommandError("--args and --kwargs are nested too deep.", returncode=MISUSED) from None
        except ValueError as error:
            raise CommandError(str(error), returncode=MISUSED) from None
        self.stdout.write(found)
        if found.state is SlotState.UNKNOWN:
            raise CommandError("Too few nodes answer and agree to know whether the slot is free.", returncode=NO_QUORUM)
        if found.state is SlotState.FREE:
            raise CommandError("The slot is free.", returncode=FREE)

    def _show(self, snapshot: Snapshot, name: str) -> None:
        locks = sorted(snapshot.locks, key=lambda lock: (len(lock.name), lock.name))
        if len(locks) > 1:
            held = ", ".join(lock.name.rpartition(" ")[2] for lock in locks)
            text = f"{len(locks)} permits are held ({held}). The nodes do not report how many there are."
            self.stdout.write(f"{printable(name)}: {text}\n\n")
        if locks:
            self.stdout.write("\n\n".join(shown(snapshot, lock) for lock in locks))


def shown(snapshot: Snapshot, lock: LockReport) -> str:
    """Return what is known about a lock, as lines of plain text."""
    held, times = lock.held_for(snapshot.taken), lock.extensions
    extended = {0: "not extended", 1: "extended once"}.get(times, f"extended {times} times")
    lease = "-" if lock.ttl is None else f"{lock.ttl:g} s, {extended}"
    facts = [
        ("Lock", printable(lock.name)),
        ("State", status(lock)),
        ("Remaining", remaining(lock)),
        ("Votes", f"{lock.votes} of {lock.nodes}, {snapshot.rules.needed} needed"),
        ("Holder", holder(lock)),
        ("Since", local(lock.since) if held is None else f"{local(lock.since)}, held for {duration(held)}"),
        ("Lease", "over, nobody renews it" if lock.kept_until else lease),
        ("Fencing token", str(lock.fencing_token or "-")),
        ("Fingerprint", lock.fingerprint),
    ]
    parts = [columns([(f"{title}:", value) for title, value in facts])]
    parts += [lock.meaning] if lock.meaning else []
    parts.append(columns([("NODE", "HAS", "REMAINING", "TOKEN", "HOLDER"), *(_row(lock, view) for view in lock.views)]))
    waiters = [f"  {position}. {printable(str(waiter))}" for position, waiter in enumerate(lock.waiters, 1)]
    if lock.waiting > len(waiters):
        waiters.append(f"  and {lock.waiting - len(lock.waiters)} more")
    parts.append("\n".join([f"Waiting: {lock.waiting or 'nobody'}", *waiters]))
    stale = [f"Stale: {key.reason.label} ({', '.join(key.nodes)})." for key in stale_keys(snapshot) if key.lock is lock]
    return "\n\n".join([*parts, *stale])


def _row(lock: LockReport, view: View) -> tuple[str, ...]:
    if not view.answered:
        return (view.node, "no answer", "-", "-", "-")
    if not view.fingerprint:
        return (view.node, "nothing", "-", str(view.fence or "-"), "-")
    has = "this holder" if view.fingerprint == lock.fingerprint else "another"
    ends = "never ends" if view.left is None else f"{view.left:.1f} s"
    return (view.node, has, ends, str(view.fence or "-"), described(view.owner) or "(another program)")


def document(snapshot: Snapshot, name: str) -> str:
    """Return what is known about a lock as JSON; its keys are described in docs/reference/api.md."""
    stale = stale_keys(snapshot)
    held = [
        {
            **entry(lock),
            "waiting": lock.waiting,
            "waiters": [
                {"host": each.host, "pid": each.pid, "label": each.label, "nodes": each.nodes} for each in lock.waiters
            ],
            "stale": [{"reason": key.reason.value, "nodes": key.nodes} for key in stale if key.lock is lock],
        }
        for lock in snapshot.locks
    ]
    about: dict[str, Any] = {
        "version": VERSION,
        "using": snapshot.alias,
        "taken": iso(snapshot.taken),
        "name": name,
        "known": snapshot.has_quorum,
        "lock": held[0] if held else None,
        "places": held,
    }
    return json.dumps(about, indent=2)


def find(name: str) -> Any:
    """
    Return the singleton task of this name, of Django's own tasks or of Celery.

    Raises:
        ValueError: There is none.
    """
    if find_spec("django.tasks"):
        from ...tasks import SingletonTask  # only here: it needs Django 6.0

        with suppress(ImportError):
            if isinstance(found := import_string(name), SingletonTask):
                return found
    if not find_spec("celery"):
        raise ValueError(f"There is no singleton task {name!r}; write the path of its function.")
    from ...celery.handle import find  # only here: Celery is optional

    return find(name)
