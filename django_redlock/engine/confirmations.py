"""The confirmations of claims: the slots of singleton tasks whose messages were sent (internal)."""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..core.attempt import Granted
from ..core.names import Owner, encode
from ..core.protocol import ANSWERS, Term, without_secrets
from ..core.round import Round
from ..core.rules import Rules
from ..core.votes import is_quorum
from ..runtime.process import process
from .watchdog import NEVER, Chore, Runtime

GATHER = 0.1  # seconds for which confirmations are gathered
ASK_AGAIN = 0.5  # seconds until nodes that did not answer are asked again
MOST = 100  # confirmations in one round


@without_secrets
class Confirmation(NamedTuple):
    """
    The confirmation of one claim.

    It keeps no more of the claim than it needs: a busy process has hundreds, and the garbage collector looks at each.

    Args:
        slugs: The name of the claim, as written in its keys.
        secret: The secret of the claim.
        fencing_token: Its fencing token.
        owner: Its owner from now on; the lock lasts for the owner's ``ttl``.
        due: When to send it, in seconds on the steady clock.
        until: When the claim lapses by itself.
    """

    slugs: tuple[str, ...]
    secret: str
    fencing_token: int
    owner: Owner
    due: float
    until: float

    @property
    def term(self) -> Term:
        """
        The lock from now on.

        A node that did not get the claim gets the lock as well, unless it knows of a later holder or of a release.
        """
        value = encode(self.secret, self.owner)
        return Term(self.slugs, self.secret, value, self.owner.ttl, self.fencing_token)


class Confirmations(Chore):
    """
    The claims of one alias that are to be confirmed.

    Nobody waits for the replies, and all claims of a moment are confirmed in one round: a process that sends many
    messages then pays much less than for a round each. Their records are written then as well, because the same work
    for one claim after another takes a third of the time.

    Args:
        rules: The options of the alias.
        runtime: The clocks, and the watchdog that sends the confirmations.
        ask: Carries out a round, blocking.
        at_once: Whether to send each one at once, because all nodes are in memory and waiting would save nothing.
    """

    def __init__(self, rules: Rules, runtime: Runtime, ask: Callable[[Round], object], *, at_once: bool) -> None:
        self._rules = rules
        self._runtime = runtime
        self._ask = ask
        self._at_once = at_once
        self._pid = process.pid
        self._mutex = threading.RLock()  # a signal handler may close the manager in a thread that has it
        self._open: deque[Confirmation] = deque()
        self._unanswered = False  # whether some of these were sent before

    def due(self) -> float:
        """Return when to send the next confirmations, on the steady clock; infinity if there are none."""
        return min([one.due for one in self._open.copy()], default=NEVER)

    def add(self, granted: Granted, owner: Owner, state: str, ttl: float) -> None:
        """
        Confirm a claim soon, which lapses by itself after its owner's ``ttl``.

        Args:
            granted: The claim.
            owner: Its owner.
            state: The owner's state from now on.
            ttl: For how long the lock lasts from now on, in seconds.
        """
        self._notice_fork()
        runtime = self._runtime
        now = runtime.clock()
        confirmed = owner._replace(state=state, ttl=ttl, since=runtime.wall())
        claim = granted.slugs, granted.secret, granted.fencing_token
        one = Confirmation(*claim, confirmed, now + GATHER, now + owner.ttl)
        if self._at_once and not self._carry_out([one]):
            return
        self._open.append(one)
        if len(self._open) == 1 or self._unanswered:  # otherwise the watchdog knows when the first one is due
            runtime.watchdog.watch(self)

    def do(self) -> None:
        """Send the confirmations that are due; the watchdog calls this."""
        self.send(self._runtime.clock())

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
                one._replace(due=now + ASK_AGAIN)
                for first in range(0, len(due), MOST)
                for one in self._carry_out(due[first : first + MOST])
                if one.until > now + ASK_AGAIN
            ]
            self._unanswered = bool(unanswered)
            self._open.extend(unanswered)

    def _notice_fork(self) -> None:
        """In a forked child, drop what it has inherited, which its parent confirms."""
        if self._pid != process.pid:
            with process.mutex:
                if self._pid != process.pid:  # still: no other thread was quicker
                    self._mutex, self._open = threading.RLock(), deque()
                    self._pid = process.pid

    def _carry_out(self, some: list[Confirmation]) -> list[Confirmation]:
        """Send confirmations in one round; return those about which too few nodes answered."""
        rules = self._rules
        round = Round.to_extend([one.term for one in some], rules, rules.timeout(rules.ttl))
        self._ask(round)
        return [] if is_quorum(round.count(*ANSWERS), rules.needed) else some
