"""Errors and log records about locks that are not granted (internal)."""

import logging
from collections.abc import Sequence
from typing import Any

from ..core.acquisition import Acquisition, GaveUp, Pause
from ..core.names import SHARED_KIND, Owner, decode, named
from ..core.protocol import votes_in
from ..core.rules import Rules, Wanted
from ..exceptions import LockTakenError, QuorumUnavailableError
from ..nodes import Node

log = logging.getLogger("django_redlock")


def error_of(
    nodes: Sequence[Node], rules: Rules, wanted: Wanted, outcome: GaveUp
) -> LockTakenError | QuorumUnavailableError:
    """Return the error of an acquisition that gave up: the lock is taken, or too few nodes answered."""
    name = named(wanted.names)
    reported = {node.name: str(outcome.replies.get(number, "not waited for")) for number, node in enumerate(nodes)}
    if not outcome.taken:
        after = votes_in(outcome.replies.values(), rules.needed) or None
        votes = (rules.needed, outcome.misconfigured, after)
        return QuorumUnavailableError(name, outcome.waited, outcome.attempts, reported, *votes)
    about = _about(decode(outcome.holder))
    why = (outcome.retry_after, about, outcome.queued, outcome.agreed)
    return LockTakenError(name, outcome.waited, outcome.attempts, reported, *why)


def _about(holder: Owner | None) -> dict[str, Any]:
    several = dict.fromkeys(("host", "pid", "since")) if holder and holder.kind == SHARED_KIND else {}
    return holder._asdict() | several if holder else {}


def explain_waiting(nodes: Sequence[Node], acquisition: Acquisition, pause: Pause) -> None:
    """Log, once per acquisition, that the caller waits for nodes rather than for another holder."""
    if pause.silent and not acquisition.explained:
        acquisition.explained = True
        reported = ", ".join(f"{nodes[node].name}: {reply}" for node, reply in sorted(pause.silent.items()))
        log.warning(
            "waiting for a quorum: %s",
            reported,
            extra={"event": "no_quorum", "lock": named(acquisition.wanted.names)},
        )
