"""
The parts shared by all telemetry: labels of locks, and their waiting and holding times.

Names of locks contain their subject, such as an order's number. A label for each name would create a time series for
each, and the name may be personal data. The label of a name is therefore its *template*.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .. import signals
from ..exceptions import LockTakenError

LONGEST = 100  # characters
MAX_LABELS = 500  # templates in one process
KINDS = frozenset({"task", "view", "model", "command", "row", "beat"})
WORDS = re.compile(r"[\w.-]+(?=([:/=\s]|$))")  # the part before the subject of the name
PART = re.compile(r"[^\W_]+")
CAMEL = re.compile(r"([A-Z]?[a-z]{2,})+N*")
UNIQUE = re.compile(r"[0-9a-f]{8}-?[0-9a-f-]{8,}|[0-9a-f]{16,}|\d+", re.IGNORECASE)


@lru_cache(maxsize=4096)
def template(name: str) -> str:
    """
    Return the label for a lock's name: ``orders:7`` and ``orders:8`` are both ``orders:*``.

    The template keeps the words before the first ``:``, ``/``, ``=`` or blank, and the second part if the first is a
    kind such as ``task``. Numbers and identifiers in them become ``N``. A name that begins in another way, such as an
    address, becomes ``*``.
    """
    name = name.split(", ")[0]
    first, *rest = name.split(":")
    if first in KINDS and rest:
        return UNIQUE.sub("N", ":".join([first, rest[0]] + ["*"] * bool(rest[1:])))[:LONGEST]
    words = WORDS.match(name)
    if words is None:
        return "*"
    text = PART.sub(_ordinary, UNIQUE.sub("N", words[0]))
    return (f"{text}{words[1]}*" if words[1] else text)[:LONGEST]


def _ordinary(part: re.Match[str]) -> str:
    """Return a part of a name if it looks like a word, or else its placeholder."""
    text = part[0]
    return text if text.islower() or text.isupper() or CAMEL.fullmatch(text) else "N"


class Labels:
    """
    The templates that one process uses as values of a label: the first :data:`MAX_LABELS`, and ``*`` for every other.

    Attributes:
        rest: How often a name got ``*`` because the limit was reached.
    """

    def __init__(self) -> None:
        self.rest = 0
        self._known: set[str] = set()

    def of(self, name: str) -> str:
        """Return the label's value for a lock's name."""
        text = template(name)
        if text not in self._known:
            if len(self._known) >= MAX_LABELS:
                self.rest += 1
                return "*"
            self._known.add(text)
        return text


@dataclass(frozen=True, slots=True)
class Listener:
    """
    The callbacks for events of locks; see :func:`listen`.

    Args:
        acquired: Called with alias, lease.
        gave_up: Called with alias, name, outcome (``taken`` or ``no_quorum``) and the seconds waited.
        ended: Called with alias, lease and outcome (the result of the release, or the reason of the loss).
        forced: Called with alias and outcome.
        node: Called with alias, name and whether it is up.
    """

    acquired: Callable[[str, Any], object]
    gave_up: Callable[[str, str, str, float], object]
    ended: Callable[[str, Any, str], object]
    forced: Callable[[str, str], object]
    node: Callable[[str, str, bool], object]


def listen(listener: Listener, uid: str) -> None:
    """
    Call *listener* for every lock of this process; a later listener with the same *uid* replaces it.
    """

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
    """Stop calling the listener with this *uid*."""
    for name, signal in signals.SIGNALS.items():
        signal.disconnect(dispatch_uid=f"django_redlock.{uid}.{name}")
