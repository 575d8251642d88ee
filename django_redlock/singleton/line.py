"""
When does a message come back that waits for the slot of its key? (internal)

A worker puts such a message back into the broker's queue. Meanwhile its place in the lock's own queue is kept, and no
other message is served before it. So it has to come back in time: the slot stays free while it is away. If it comes
back too early, it is put back once more.

The pause is as long as the runs before its own will take. A process that had a run knows how long it took, and the
description of a run tells that to messages that find the slot taken. While no length is known, a message comes back
soon, again and again, until the present run has ended.
"""

from contextlib import suppress
from math import inf
from typing import NamedTuple

SOON = 0.5  # seconds, the longest wait of the next message in a process
BRIEF = 0.1  # seconds, the same of a message that has others before it
EARLY = 0.25  # seconds before its turn at which a message comes back, to wait in a process; half a run at most
SHORTEST, LONGEST = 0.1, 600.0  # seconds for which a message is put back
PART, LONGEST_GUESS = 4, 10.0  # a guess is this part of the time that has passed, and at most so long
BETWEEN = 0.035  # seconds from the end of a run to the beginning of the next
FRESH, SLOTS = 60.0, 1000  # for how many seconds, and of how many slots, a process remembers how long runs take
GRACE = 3.0  # seconds for which the place of a message is kept after its pause, until a process has taken it


def write_length(seconds: float) -> str:
    """Return what a run tells about the length of runs; empty if nothing is known."""
    return f"{seconds:.3f}" if seconds else ""


def read_length(text: str) -> float:
    """Return the length in what a run tells, in seconds; 0.0 if there is none."""
    with suppress(ValueError):
        if 0.0 < (seconds := float(text)) < inf:
            return seconds
    return 0.0


class Lengths:
    """
    How long runs take, in seconds, as far as a process knows: it has had some itself, and runs of others tell it.

    The measured lengths and those that others tell are kept apart, and a run tells only a measured one. If processes
    passed on what they have heard, one long run would stay known for ever.
    """

    def __init__(self) -> None:
        self._measured: dict[str, tuple[float, float]] = {}
        self._told: dict[str, tuple[float, float]] = {}

    def measure(self, slot: str, seconds: float, now: float) -> None:
        """
        Note the length of a run.

        A long run counts for twice the length before it at most. Otherwise, one long run among short ones would keep
        the messages away for many times the length of the others, and with them all that come after them.
        """
        before = self.measured(slot, now)
        _note(self._measured, slot, min(seconds, 2 * before) if before else seconds, now)

    def measured(self, slot: str, now: float) -> float:
        """Return the length to expect from what was measured lately; 0.0 if there was none."""
        return _known(self._measured, slot, now)

    def expected(self, slot: str, told: float, now: float) -> float:
        """
        Note what the present run tells, and return the shortest length that is known; 0.0 if none is.

        If it is too short, a message comes back once more; if it is too long, the slot stays free.

        Args:
            slot: The name of the slot.
            told: What the present run tells; 0.0 if that does not know.
            now: The time.
        """
        heard = _known(self._told, slot, now)
        if told and not 0.0 < heard <= told:
            _note(self._told, slot, told, now)
            heard = told
        return min(filter(None, (heard, self.measured(slot, now))), default=0.0)


def _known(lengths: dict[str, tuple[float, float]], slot: str, now: float) -> float:
    seconds, at = lengths.get(slot, (0.0, -inf))
    return seconds if now - at < FRESH else 0.0


def _note(lengths: dict[str, tuple[float, float]], slot: str, seconds: float, now: float) -> None:
    if len(lengths) >= SLOTS:
        lengths.clear()
    lengths[slot] = (seconds, now)


class Wait(NamedTuple):
    """
    How long a message has to wait.

    Args:
        length: How long a run takes, in seconds; 0.0 if that is not known.
        ahead: How many waiters come before the message.
        waited: For how long it has been put back until now, in seconds.
        lasted: For how long the present run has lasted, in seconds; None if there is none, or if that is not known.
        left: Seconds until the slot is free, if it is kept for a time after a run; else None.
        limit: How many runs may have the slot at once.
    """

    length: float
    ahead: int
    waited: float
    lasted: float | None
    left: float | None = None
    limit: int = 1

    @property
    def known(self) -> bool:
        """Whether it is known when the slot will be free next."""
        return self.left is not None or (self.lasted or 0.0) < self.length

    @property
    def turn(self) -> float:
        """Seconds until its turn."""
        first = self.left
        if first is None:
            first = 0.0 if self.lasted is None else max(self.length - self.lasted, 0.0)
        return (first + self.ahead * (self.length + BETWEEN)) / self.limit

    @property
    def is_short(self) -> bool:
        """Whether it is worth waiting in the process, because it is its turn in a moment."""
        if self.ahead:
            return self.known and self.turn <= BRIEF
        return (self.turn if self.known else self.lasted or self.waited) <= SOON

    @property
    def pause(self) -> float:
        """For how many seconds to put the message back."""
        if self.known:
            at_least = self.turn - min(EARLY, self.length / 2 or EARLY)
        elif self.lasted is None:  # a run begins in a moment, or whoever is next is away
            at_least = max(self.turn, min(self.waited / PART, LONGEST_GUESS))
        else:
            at_least = max(self.turn, min(self.lasted / PART * (1 + self.ahead), LONGEST_GUESS))
        return min(max(at_least, SHORTEST), LONGEST)
