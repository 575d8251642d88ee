"""
When does a message come back that waits for the slot of its key? (internal)

A worker puts such a message back into the broker's queue. Meanwhile its place in the lock's own queue is kept, and
others leave a free slot to it. So it has to come back in time. If it comes back too early, it is put back once more.

The pause is as long as the runs before its own will take. A process that had a run knows how long it took, and the
description of the next run tells that to messages that find the slot taken. While no length is known, a message comes
back soon, again and again, until the present run has ended. While few are known, its first pause ends at
half of the wait, and it looks again: the first run of a process often takes longer than the others. A message behind
many others does not look again early. Each look costs the broker a message, and the slot is idle until workers have
looked at all of them, so that message comes back too early in any case.

Lengths differ, so some messages come back too late. One that comes back and finds the slot free, and again a moment
later, overtakes them; see :func:`.arrival._wait_in_process`. Otherwise all would wait for the one that is away for
longest.
"""

from collections import deque
from contextlib import suppress
from math import inf
from typing import NamedTuple

SOON = 0.5  # seconds, the longest wait of the next message in a process
BRIEF = 0.1  # seconds, the same of a message that has others before it
EARLY = 0.25  # seconds before its turn at which a message comes back, to wait in a process; half a turn at most
SHORTEST, LONGEST = 0.1, 600.0  # seconds for which a message is put back
PART, LONGEST_GUESS = 4, 10.0  # a guess is this part of the time that has passed, and at most so long
BETWEEN = 0.035  # seconds from the end of a run to the beginning of the next
FRESH, SLOTS = 60.0, 1000  # for how many seconds, and of how many slots, a process remembers how long runs take
LAST, SURE = 5, 3  # how many lengths of each kind it remembers of a slot, and how many it must know to count on them
FEW = 50  # a message with more than these before it does not look again at half of its wait
BELIEVED = 1.0  # seconds that each run before its own may take at most, as long as it knows fewer
PERMITS = 20  # at how many of them a message looks
IDLE = 0.25  # seconds for which a free slot is left to messages that come first, and are away
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


class Expected(NamedTuple):
    """
    How long a run will probably take.

    Args:
        seconds: The median of the last lengths that are known; 0.0 if none is.
        sure: Whether enough of them are known.
    """

    seconds: float = 0.0
    sure: bool = False


class RunLength(NamedTuple):
    """How long a run took, when that became known, and since when the run that told it has lasted."""

    seconds: float
    at: float
    since: float = 0.0


class Lengths:
    """
    How long runs take, in seconds, as far as a process knows: it has had some itself, and runs of others tell it.

    The measured lengths and those that others tell are kept apart, and a run tells only a measured one. If processes
    passed on what they have heard, one long run would stay known for ever.
    """

    def __init__(self) -> None:
        self._measured: dict[str, deque[RunLength]] = {}
        self._told: dict[str, deque[RunLength]] = {}

    def measure(self, slot: str, seconds: float, now: float) -> None:
        """Note the length of a run."""
        _note(self._measured, slot, RunLength(seconds, now))

    def measured(self, slot: str, now: float) -> float:
        """Return the length of the last run in this process; 0.0 if there was none lately."""
        return next((each.seconds for each in reversed(_known(self._measured, slot, now))), 0.0)

    def expected(self, slot: str, told: float, since: float, now: float) -> Expected:
        """
        Note what the present run tells, and return the length to expect.

        It is the median of the last: if runs are mostly short, a long one keeps no message away for longer.

        Args:
            slot: The name of the slot.
            told: What the present run tells; 0.0 if that does not know.
            since: When the present run began. It tells the same to each message, and counts once.
            now: The time.
        """
        heard = _known(self._told, slot, now)
        if told and all(each.since != since for each in heard):
            heard.append(RunLength(told, now, since))
            _note(self._told, slot, heard[-1])
        known = sorted(each.seconds for each in heard + _known(self._measured, slot, now))
        return Expected(known[(len(known) - 1) // 2], len(known) >= SURE) if known else Expected()


def _known(lengths: dict[str, deque[RunLength]], slot: str, now: float) -> list[RunLength]:
    # A copy, in one step: another thread may note a length meanwhile.
    return [each for each in tuple(lengths.get(slot, ())) if now - each.at < FRESH]


def _note(lengths: dict[str, deque[RunLength]], slot: str, length: RunLength) -> None:
    if slot not in lengths and len(lengths) >= SLOTS:
        lengths.clear()
    lengths.setdefault(slot, deque(maxlen=LAST)).append(length)


class Wait(NamedTuple):
    """
    How long a message has to wait.

    Args:
        length: How long a run takes, in seconds; 0.0 if that is not known.
        ahead: How many waiters come before the message.
        waited: For how long it has been put back until now, in seconds.
        lasted: For how long the present run has lasted, in seconds; None if there is none, or if that is not known.
        left: Seconds until the slot is free, if it is kept for a time after a run; else None.
        limit: How many runs may have the slot at once, each with a permit.
        looked: Of how many of these permits *lasted* or *left* is that of the one that is free first.
        sure: Whether enough runs say how long one takes.
    """

    length: float
    ahead: int
    waited: float
    lasted: float | None
    left: float | None = None
    limit: int = 1
    looked: int = 1
    sure: bool = True

    @property
    def known(self) -> bool:
        """Whether it is known when the slot will be free next."""
        return self.left is not None or (self.lasted or 0.0) < self.length

    @property
    def turn(self) -> float:
        """Seconds until its turn."""
        return self._first + self.ahead * (self.length + BETWEEN) / self.limit

    @property
    def _first(self) -> float:
        """Seconds until the slot is free, or the first of all permits, which is before the first of some."""
        left = self.left
        if left is None:
            left = 0.0 if self.lasted is None else max(self.length - self.lasted, 0.0)
        return left * (1 + self.looked) / (1 + self.limit)

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
            half = (self.length + BETWEEN) / 2 if self.length else EARLY
            at_least = self.turn - min(EARLY, half)
            if not self.sure:  # so few runs may have been the long ones
                believed = max(self._first + self.length, self.ahead * BELIEVED, LONGEST_GUESS)
                at_least = min(at_least, believed)
                if not self.waited and self.ahead <= FEW:
                    at_least = min(at_least, max(self._first, self.turn / 2))
        elif self.lasted is None:  # a run begins in a moment, or whoever is next is away
            at_least = max(self.turn, min(self.waited / PART, LONGEST_GUESS))
        else:
            at_least = max(self.turn, min(self.lasted / PART * (1 + self.ahead), LONGEST_GUESS))
        return min(max(at_least, SHORTEST), LONGEST)
