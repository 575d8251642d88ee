"""
Confirm claims in the background: locks that were taken for a moment, and are to last (internal).

A caller of a singleton task claims its slot, sends its message, and adds a confirmation here. Nobody waits for the
replies. A little later, the watchdog's thread confirms all claims of that moment in one round, which costs a process
that sends many messages much less than a round for each.
"""

import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.protocol import ANSWERS, Extend, Kind, Reply, Term
from ..core.round import Round, count
from .process import process

if TYPE_CHECKING:
    from .manager import LockManager

GATHER = 0.05  # seconds for which confirmations are gathered
AGAIN = 0.5  # seconds until nodes that did not answer are asked again
MOST = 50  # confirmations in one round
NEVER = float("inf")


class Confirmation(NamedTuple):
    """
    The confirmation of one claim.

    Args:
        term: The lock from now on. A node that did not get the claim gets the lock as well, unless it knows of a later
            holder or of a release.
        due: When to send it, in seconds on the steady clock.
        until: When the claim lapses by itself.
    """

    term: Term
    due: float
    until: float


class Confirmations:
    """
    The claims of one alias that are to be confirmed; the watchdog treats them as one lease.

    Args:
        manager: The manager of the alias.
    """

    renewed = True
    slack = 0.0

    def __init__(self, manager: "LockManager") -> None:
        self._manager = manager
        self._at_once = all(node.instant for node in manager.nodes)  # nodes in memory cost nothing, so why wait
        self._pid = process.pid
        self._mutex = threading.Lock()
        self._open: deque[Confirmation] = deque()
        self._unanswered = False  # whether some of these were sent before

    @property
    def hold(self) -> "Confirmations":
        """The object itself, which knows when the watchdog has to look at it."""
        return self

    @property
    def keeper(self) -> "Confirmations":
        """The object itself, which sends the confirmations."""
        return self

    def valid(self) -> bool:
        """Return True, because this never ends."""
        return True

    def due(self) -> float:
        """Return when to send the next confirmations, on the steady clock; infinity if there are none."""
        return min([one.due for one in self._open.copy()], default=NEVER)

    def add(self, term: Term, lapses: float) -> None:
        """
        Confirm a claim soon.

        Args:
            term: The lock from now on.
            lapses: Seconds until the claim lapses.
        """
        self._notice_fork()
        now = self._manager.runtime.clock()
        one = Confirmation(term, now + GATHER, now + lapses)
        if self._at_once and not self._carry_out([one]):
            return
        self._open.append(one)
        if len(self._open) == 1 or self._unanswered:  # otherwise the watchdog knows when the first one is due
            self._manager.runtime.watchdog.watch(self)

    def extend(self, leases: Any = ()) -> int:
        """Send the confirmations that are due; the watchdog calls this."""
        self.send(self._manager.runtime.clock())
        return 0

    async def aextend(self, leases: Any) -> int:
        """Do nothing: only the watchdog of the threads looks after confirmations."""
        return 0

    def send(self, now: float) -> None:
        """
        Send all confirmations once the first one is due at *now*.

        Those that no quorum answers are sent again for a while.
        """
        self._notice_fork()
        with self._mutex:
            found = [self._open.popleft() for _ in range(len(self._open))]
            self._open.extend(one for one in found if one.due > now + GATHER)
            due = [one for one in found if one.due <= now + GATHER]
            unanswered = [
                one._replace(due=now + AGAIN)
                for first in range(0, len(due), MOST)
                for one in self._carry_out(due[first : first + MOST])
                if one.until > now + AGAIN
            ]
            self._unanswered = bool(unanswered)
            self._open.extend(unanswered)

    def _notice_fork(self) -> None:
        """In a forked child, drop what it has inherited, which its parent confirms."""
        if self._pid != process.pid:
            self._pid, self._mutex, self._open = process.pid, threading.Lock(), deque()

    def _carry_out(self, some: list[Confirmation]) -> list[Confirmation]:
        """Send confirmations in one round; return those about which too few nodes answered."""
        rules = self._manager.rules
        request = Extend(tuple(one.term for one in some), rules.fence_keep)

        def decided(replies: Mapping[int, Reply]) -> bool:
            return count(replies, Kind.HELD) >= rules.needed

        requests = dict.fromkeys(range(rules.nodes), request)
        round = Round(requests, decided, rules.timeout(rules.ttl), rules.needed, Kind.HELD)
        self._manager.ask(round)
        return some if round.count(*ANSWERS) < rules.needed else []
