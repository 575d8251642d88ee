"""
Inspect the nodes of an alias, each by itself and all together (internal).

The doctor changes nothing on a node except its own keys, which are gone a minute later at the latest.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from shlex import quote
from statistics import median

from django.conf import settings
from django.core.checks import ERROR

from ..checks import check_settings
from ..core.admission import MAX_SKEW
from ..core.protocol import Outcome
from ..core.rules import DEFAULT_ALIAS, Rules
from ..core.votes import is_quorum
from ..engine.manager import LockManager, owner_here
from ..exceptions import RedlockError, printable
from ..handler import locks
from ..nodes.base import Node
from ..nodes.inspection import Finding, Inspection, Level, error, inspect_all, warning
from . import held_locks, stale_keys
from .model import Staleness, name_of
from .node_checks import check, severity

CLOCKS_APART = 0.1  # seconds; clocks further apart may cost tokens a second round trip


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """
    What the doctor found for one alias.

    Args:
        alias: The alias in ``REDLOCK``.
        nodes: What each node reports about itself.
        findings: What is wrong, the worst first.
    """

    alias: str
    nodes: tuple[Inspection, ...]
    findings: tuple[Finding, ...]

    @property
    def level(self) -> Level | None:
        """The worst level found; None if nothing is wrong."""
        return max((finding.level for finding in self.findings), key=severity, default=None)


def diagnose(using: str = DEFAULT_ALIAS, *, timeout: float = 1.0) -> Diagnosis:
    """
    Inspect the nodes of an alias, and take, extend and release a lock of the doctor's own on each of them.

    Args:
        using: The alias in ``REDLOCK``.
        timeout: Seconds to wait for each answer of a node.

    Raises:
        InvalidRedlockError: The alias cannot be used.
    """
    manager = locks[using]
    inspected = inspect_all(manager.nodes, timeout)
    found = [
        *_settings(using),
        *_quorum(inspected, manager.rules),
        *(finding._replace(node=node.name) for node in inspected for finding in check(node, manager.rules)),
        *_duplicates(inspected),
        *_clocks(inspected),
        *_keys(using),
    ]
    explained = {finding.node for finding in found if finding.level is Level.ERROR}
    found += [finding for finding in _trials(manager, inspected, timeout) if finding.node not in explained]
    shown = [finding for finding in found if f"redlock.{finding.id}" not in settings.SILENCED_SYSTEM_CHECKS]
    worst_first = sorted(shown, key=lambda finding: -severity(finding.level))
    return Diagnosis(using, tuple(inspected), tuple(worst_first))


def _settings(alias: str) -> Iterator[Finding]:
    """Yield what the system checks report about this alias, and which nodes other parts of the project use."""
    for message in check_settings():
        if f"REDLOCK[{alias!r}]" in message.msg and not message.is_silenced():
            level = Level.ERROR if message.level >= ERROR else Level.WARNING
            yield Finding(str(message.id), level, message.msg, str(message.hint or ""))


def _quorum(inspected: list[Inspection], rules: Rules) -> Iterator[Finding]:
    reached = sum(not node.detail for node in inspected)
    if not is_quorum(reached, rules.needed):
        yield error(
            "no-quorum",
            f"{reached} of {rules.nodes} nodes can be reached, and {rules.needed} are needed: no lock can be taken.",
            "Restore nodes; the findings below show what each of them lacks.",
        )


def _duplicates(inspected: list[Inspection]) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for node in inspected:
        run_id = node.info.get("run_id", "")
        if run_id and first.setdefault(run_id, node.name) != node.name:
            yield error(
                "duplicate",
                f"It is the same server as {first[run_id]}: one server has one vote, however often it is listed.",
                "List independent servers in NODES.",
                node.name,
            )


def _clocks(inspected: list[Inspection]) -> Iterator[Finding]:
    known = [node for node in inspected if node.round_trip and node.known]  # other nodes have no clock to compare
    if len(known) < 2:
        return
    middle = median(node.ahead for node in known)
    for node in known:
        apart = abs(node.ahead - middle) - node.round_trip / 2
        if apart > CLOCKS_APART:
            doubted = apart > MAX_SKEW
            yield Finding(
                "clock",
                Level.ERROR if doubted else Level.WARNING,
                f"Its clock is {apart:.1f} s {'ahead of' if node.ahead > middle else 'behind'} the others': "
                + ("it gives no vote." if doubted else "fencing tokens may cost a second round trip."),
                "Run NTP on its host (chronyc tracking, timedatectl), and do not set its clock manually.",
                node.name,
            )
    if abs(middle) > MAX_SKEW:
        yield warning(
            "own-clock",
            f"The clock of this machine is {abs(middle):.1f} s {'behind' if middle > 0 else 'ahead of'} the nodes': "
            "tokens cost a second round trip, and ages are shown wrong.",
            "Run NTP on this host.",
        )


def _keys(alias: str) -> Iterator[Finding]:
    """Yield the keys that other programs wrote, and that keep a lock from everybody or cost it a vote."""
    snapshot = held_locks(alias)
    for odd in snapshot.wrong_type:
        yield error(
            "wrong-type",
            f"Its key {printable(odd.key)} is of another type: it gives no vote on the lock {printable(odd.name)!r}.",
            f"{odd.deletion} on this node; find out what wrote it, and give the locks a user of their own.",
            odd.node,
        )
    named = {odd.slug for odd in snapshot.wrong_type}
    for key in stale_keys(snapshot):
        if key.reason not in (Staleness.ABSURD, Staleness.RESIDUE) and key.lock.slug not in named:
            yield warning(
                "stale-key",
                f"The lock {printable(key.lock.name)!r} has a stale key on {', '.join(key.nodes)}: {key.reason.label}.",
                f"manage.py redlock_clear --using {quote(alias)}; find out what wrote the key.",
            )
    for slug, nodes in sorted(snapshot.absurd.items()):
        name = printable(name_of(slug))
        for node in nodes:
            yield error(
                "absurd-token",
                f"Its fencing token for the lock {name!r} is absurd, so it gives no vote on this lock.",
                f"manage.py redlock_clear --using {quote(alias)}, or with --name for this lock alone; find out what "
                "wrote it.",
                node,
            )


def _trials(manager: LockManager, inspected: list[Inspection], timeout: float) -> Iterator[Finding]:
    """Take, extend and release a lock on each node that can be reached, as if it were the only node."""
    for node, inspection in zip(manager.nodes, inspected, strict=True):
        if inspection.detail:
            continue
        problem = _trial(node, manager.rules, timeout)
        if problem:
            yield error(
                "trial",
                f"A lock of the doctor's own could not be taken, extended and released on it: {problem}",
                "See the other findings about it, its log, and the explanation of these words in the documentation of "
                "settings.",
                node.name,
            )


def _trial(node: Node, rules: Rules, timeout: float) -> str:
    ttl = max(60.0, 5 * timeout)  # longer than a few rounds take
    alone = Rules(
        nodes=1,
        ttl=ttl,
        max_ttl=max(ttl, rules.max_ttl),
        node_timeout=timeout,
        fence_keep=60.0,
        restart_guard=False,
        clock_guard=False,
        allow_evicting=(node.name,),
    )
    manager = LockManager([node], alone, alias="doctor")
    try:
        owner = owner_here("command", "doctor")
        lease = manager.on_behalf(f"doctor:{os.urandom(8).hex()}", owner, wait=0, renew=False).acquire()
        extended = lease.extend()
        outcome = lease.release()
        return "" if extended and outcome is Outcome.RELEASED else f"extended: {extended}, release: {outcome}."
    except RedlockError as problem:
        return str(problem)
    finally:
        manager.close()
