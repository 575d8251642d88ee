"""
The parts shared by all telemetry: labels of locks, and their waiting and holding times.

Names of locks contain their subject, such as an order's number. A label for each name would create a time series for
each, and the name may be personal data. The label of a name is therefore its *template*.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from .. import signals
from ..core.protocol import LOST
from ..exceptions import LockTakenError

LONGEST = 100  # characters
MAX_LABELS = 500  # templates in one process
KINDS = frozenset({"task", "model", "row", "beat"})
OF_REQUESTS = frozenset({"view", "command"})  # kinds whose keys may begin with a value that somebody sent
WORDS = re.compile(r"[\w.-]+(?=([:/=\s]|$))")  # the part before the subject of the name
PART = re.compile(r"[^\W_]+")
CAMEL = re.compile(r"[A-Z]?[a-z]{2,}(?:[A-Z][a-z]{2,})*N*")  # one way to match each word: linear time
UNIQUE = re.compile(r"[0-9a-f]{8}-?[0-9a-f-]{8,}|[0-9a-f]{16,}|\d+", re.IGNORECASE)


@lru_cache(maxsize=4096)
def template(name: str) -> str:
    """
    Return the label for a lock's name: ``orders:7`` and ``orders:8`` are both ``orders:*``.

    The template keeps the words before the first ``:``, ``/``, ``=`` or blank, and the second part if the first is a
    kind such as ``task``. Numbers and identifiers in them become ``N``. A name that begins in another way, such as an
    address, becomes ``*``. So does the key of a view that is a single value.
    """
    name = name.split(", ")[0]
    kind, _, rest = name.partition(":")
    if kind in OF_REQUESTS and rest:
        subject = "*" if kind == "view" and ":" not in rest else _template_of_words(rest)
        return f"{kind}:{subject}"[:LONGEST]
    if kind in KINDS and rest:
        which, more, _ = rest.partition(":")
        return UNIQUE.sub("N", f"{kind}:{which}{more}{'*' if more else ''}")[:LONGEST]
    return _template_of_words(name)


def _template_of_words(name: str) -> str:
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


def listen(uid: str, **receivers: Callable[..., object]) -> None:
    """
    Call functions for every lock of this process, until :func:`unlisten` is called.

    Args:
        uid: What identifies the listener.
        receivers: A receiver for each signal, by the name of the signal.
    """
    for name, receiver in receivers.items():
        signals.SIGNALS[name].connect(receiver, weak=False, dispatch_uid=f"django_redlock.{uid}.{name}")


def unlisten(uid: str) -> None:
    """Stop calling the listener with this *uid*."""
    for name, signal in signals.SIGNALS.items():
        signal.disconnect(dispatch_uid=f"django_redlock.{uid}.{name}")


def end_of(lease: Any, outcome: str = "") -> str:
    """Return how a hold ended: the *outcome* of its release, or the reason if the lock was lost before."""
    return outcome if outcome and outcome not in LOST else str(lease.reason)


def outcome_of(error: Exception) -> str:
    """Return the outcome of an attempt that a caller gave up."""
    return "taken" if isinstance(error, LockTakenError) else "no_quorum"
