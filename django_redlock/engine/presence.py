"""The presence of this process on the nodes of one alias: a key that shows operators that it lives (internal)."""

import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable
from hashlib import blake2b

from ..core.names import SECRET_SIZE, Owner, encode, heartbeat
from ..core.protocol import POSITIVE, Acquire
from ..core.round import Round
from ..core.rules import Rules
from ..runtime.process import HOST, process
from .watchdog import NEVER, Chore, Dog, note_drops

FIRST = 2.0  # seconds from taking a lock to the first sign of life, so that short holds cost nothing
EVERY = 3.0  # seconds between two signs of life
LIFE = 10.0  # seconds for which a process counts as alive after a sign of life
OVERDUE = 6.0  # seconds after which the process of a lock should have given a sign of life

_KEY = os.urandom(16)  # secret, so that no other process can write the key


class Presence(Chore):
    """
    The signs of life that one process gives on the nodes of one alias.

    A process that holds locks for longer than a moment keeps one key on every node, which the watchdog renews. So an
    operator sees which held locks nobody will release, without guessing from a host and a process id. Nothing else
    depends on the key: a lock is held by its own keys alone. The key outlasts the longest lease. While it exists, the
    process may be paused and hold a valid lease; when it is gone, every lease of the process has ended.

    Args:
        keeper: The manager of the leases for which the signs are given.
        rules: The options of the alias.
        ask: Carries out a round, blocking.
        aask: Carries out a round in the running event loop.
        owner: The process.
        dog: The watchdog that looks after the leases.
        clock: Returns seconds on a steady clock.
        dropped: The end of each lease that was dropped without a release. The nodes keep its lock until then, so the
            signs go on.

    Attributes:
        next_sign: When the next sign is due, on the steady clock; ``NEVER`` while none is given.
    """

    def __init__(
        self,
        keeper: object,
        rules: Rules,
        ask: Callable[[Round], object],
        aask: Callable[[Round], Awaitable[object]],
        owner: Owner,
        dog: Dog,
        clock: Callable[[], float],
        dropped: Iterable[float] = (),
    ):
        self._keeper = keeper
        self._rules = rules
        self._ask = ask
        self._aask = aask
        self._owner = owner
        self._dropped = dropped
        self._dog = dog
        self._clock = clock
        self._mutex = threading.RLock()  # a signal handler may take a lock in a thread that has it
        # All event loops and threads of a process use the same secret: they write the same key, and each of them keeps
        # it alive.
        self._secret = blake2b(owner.process.encode(), key=_KEY, digest_size=SECRET_SIZE // 2).hexdigest()
        self._slugs = (heartbeat(owner.process),)
        self.next_sign = NEVER

    def join(self) -> None:
        """Give signs of life from now on; called when the process has taken a lock and ``next_sign`` is ``NEVER``."""
        with self._mutex:
            if self.next_sign is NEVER:
                try:
                    self.next_sign = self._clock() + FIRST
                    self._dog.watch(self)
                except BaseException:  # the next lock tries again
                    self.next_sign = NEVER
                    raise

    def leave(self) -> None:
        """Stop unless locks are held, because the connections are closed; the next lock starts the signs again."""
        if not self.valid():
            self._dog.forget(self)

    def due(self) -> float:
        """Return when the next sign is due."""
        return self.next_sign

    def valid(self) -> bool:
        """Return whether locks are held; if none is, give no more signs."""
        note_drops()
        with self._mutex:
            if not self._dog.tends(self._keeper) and max(self._dropped, default=0.0) <= self._clock():
                due, self.next_sign = self.next_sign, NEVER
                if self._dog.tends(self._keeper):
                    self.next_sign = due  # meanwhile a thread took a lock and found the signs still going on
        return self.next_sign is not NEVER

    def do(self) -> int:
        """Give a sign of life, blocking for at most one node timeout; return how many nodes have it."""
        round = self._sign()
        self._ask(round)
        return round.count(*POSITIVE)

    async def ado(self) -> int:
        """Give a sign of life without blocking; return how many nodes have it."""
        round = self._sign()
        await self._aask(round)
        return round.count(*POSITIVE)

    def _sign(self) -> Round:
        with self._mutex:
            if self.next_sign is not NEVER:
                self.next_sign = self._clock() + EVERY
        # Token 0 is never accepted, so no fence is kept; the key itself is what counts.
        life = self._rules.guard + LIFE
        value = encode(self._secret, self._owner._replace(ttl=life))
        request = Acquire(self._slugs, self._secret, value, life, 0, life, 0.0)
        return Round.to_beat(request, self._rules)


def this_process(since: float) -> Owner:
    """Return the description of this process: the program's name, without its arguments, which may be secret."""
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    return Owner(HOST, process.pid, "process", program, since=since, ttl=LIFE, process=process.name)
