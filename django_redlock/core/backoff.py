"""
How long to wait between two attempts (internal).

A waiter relies on being notified, and asks again by itself only because a notification can be lost. A contender that
nobody will notify backs off with random pauses that grow, as "Exponential Backoff And Jitter" (AWS Architecture Blog)
recommends under the name "decorrelated jitter".
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from .attempt import Verdict
from .protocol import Reply
from .rules import Rules

POLL = 1.0  # seconds after which a waiter asks again, even though nodes would notify it of its turn
LEAST_POLL = 0.02  # least seconds before a waiter asks again about a hold that is about to end
UNNOTIFIED_POLL = 0.05  # seconds of pause per waiter ahead in the queue, while too few nodes can notify this one


class Pause(NamedTuple):
    """
    Wait before the next attempt, or until a node notifies the waiter.

    Args:
        seconds: How long to wait if too few nodes can notify the waiter of its turn.
        notified: How long to wait, in seconds, if a quorum of nodes can.
        silent: The replies of nodes that gave no vote, if their silence is why the caller has no lock yet.
    """

    seconds: float
    notified: float
    silent: Mapping[int, Reply] = MappingProxyType({})


class Backoff:
    """
    The pauses of one acquisition.

    Args:
        rules: The options of the alias.
        chance: Draws a number from 0 to 1, for jitter.
    """

    __slots__ = ("_chance", "_delay", "_rules")

    def __init__(self, rules: Rules, chance: Callable[[], float]) -> None:
        self._rules = rules
        self._chance = chance
        self._delay = rules.retry_delay

    def pause(self, verdict: Verdict, left: float | None) -> Pause:
        """
        Return the next pause, which is hardly longer than the present hold can last.

        Args:
            verdict: What the replies to the last attempt mean.
            left: Seconds for which to go on trying; None is for ever.
        """
        notified = self._poll(verdict.free_in)
        if verdict.split:
            # The contenders gave back what they had, so one of them wins soon unless all of them ask again at the same
            # moment.
            seconds = notified = self._rules.retry_delay * self._chance()
        elif verdict.last_position >= 0 and not verdict.cut_off and not verdict.lacks_votes:
            # The waiter is in a queue, so nodes will notify it. While too few nodes can, it asks again by itself, after
            # pauses that get shorter as its turn comes nearer.
            seconds = min(notified, UNNOTIFIED_POLL * (verdict.last_position + self._chance()))
        else:
            # No node will notify the caller: it is in no queue, or it lacks only votes, which no release brings.
            seconds = notified = min(notified, self._grow())
        limit = float("inf") if left is None else max(left, 0.0)
        return Pause(min(seconds, limit), min(notified, limit), verdict.silent)

    def _poll(self, free_in: float | None) -> float:
        """Return the seconds after which a waiter asks again even if no notification has come."""
        poll = POLL if free_in is None else min(POLL, max(free_in, LEAST_POLL))
        return poll + LEAST_POLL * self._chance()

    def _grow(self) -> float:
        """Return a random delay from the shortest to three times the previous one, at most ten times the shortest."""
        shortest = self._rules.retry_delay
        self._delay = min(10 * shortest, shortest + self._chance() * (3 * self._delay - shortest))
        return self._delay
