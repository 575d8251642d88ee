"""
What every kind of telemetry says of a lock: by what it is labelled, and how long one waited for it and held it.

Names of locks hold what they are about, such as an order's number: a label of each would cost a time series each,
and may be personal. So names are labelled by their *template*.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from . import signals
from .exceptions import LockTakenError

LONGEST = 100  # characters
KINDS = frozenset({"task", "view", "model", "command", "row", "beat"})
UNIQUE = re.compile(r"[0-9a-f]{8}-?[0-9a-f-]{8,}|[0-9a-f]{16,}|\d+", re.IGNORECASE)


@lru_cache(maxsize=4096)
def template(name: str) -> str:
    """
    Return what stands for a lock's name in labels: ``orders:7`` and ``orders:8`` are both ``orders:*``.

    The first part of the name stays, and the second if the first is a kind such as ``task``; numbers and identifiers in
    them become ``N``.
    """
    first, *rest = name.split(", ")[0].split(":")
    kept, rest = ([first, rest[0]], rest[1:]) if first in KINDS and rest else ([first], rest)
    text = ":".join(kept + ["*"] * bool(rest))
    return UNIQUE.sub("N", text)[:LONGEST]


@dataclass(frozen=True, slots=True)
class Listener:
    """
    What is told of locks; see :func:`listen`.

    Args:
        acquired: Called with alias, lease.
        gave_up: Called with alias, name, outcome (``taken`` or ``no_quorum``) and the seconds waited.
        ended: Called with alias, lease and outcome (what the release said, or why the lease was lost).
        forced: Called with alias and outcome.
        node: Called with alias, name and whether it is up.
    """

    acquired: Callable[[str, Any], object]
    gave_up: Callable[[str, str, str, float], object]
    ended: Callable[[str, Any, str], object]
    forced: Callable[[str, str], object]
    node: Callable[[str, str, bool], object]


def listen(listener: Listener, uid: str) -> None:
    """Tell *listener* of every lock of this process from now on; of the same *uid* there is one."""

    def acquired(sender: Any, lease: Any, **about: Any) -> None:
        listener.acquired(sender.alias, lease)

    def taken(sender: Any, name: str, error: Any, **about: Any) -> None:
        outcome = "taken" if isinstance(error, LockTakenError) else "no_quorum"
        listener.gave_up(sender.alias, name, outcome, error.waited)

    def released(sender: Any, lease: Any, outcome: str, **about: Any) -> None:
        listener.ended(sender.alias, lease, outcome)

    def lost(sender: Any, lease: Any, reason: str, **about: Any) -> None:
        listener.ended(sender.alias, lease, reason)

    def forced(sender: Any, outcome: str, **about: Any) -> None:
        listener.forced(sender.alias, outcome)

    def node_down(sender: Any, node: str, **about: Any) -> None:
        listener.node(sender.alias, node, False)

    def node_up(sender: Any, node: str, **about: Any) -> None:
        listener.node(sender.alias, node, True)

    receivers: tuple[Callable[..., None], ...] = (acquired, released, taken, lost, forced, node_down, node_up)
    names = ("lock_acquired", "lock_released", "lock_taken", "lock_lost", "lock_forced", "node_down", "node_up")
    for name, receiver in zip(names, receivers, strict=True):
        signals.SIGNALS[name].connect(receiver, weak=False, dispatch_uid=f"django_redlock.{uid}.{name}")


def unlisten(uid: str) -> None:
    """Tell the listener of this *uid* no more."""
    for name, signal in signals.SIGNALS.items():
        signal.disconnect(dispatch_uid=f"django_redlock.{uid}.{name}")
