"""
A database with one row per lock, two counters in it, and transactions that can take for ever.

Both counters are incremented by read, pause and write: one without protection, and one after the row was claimed with
(token, owner).
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import exp
from typing import Any

from tests.machine.network import MOMENT, Faults
from tests.machine.process import Process
from tests.machine.world import World

from .profiles import TTL, Profile

UNFENCED, CLAIMED = "no fence", "claimed before reading"
GUARDS = (UNFENCED, CLAIMED)

Answer = Callable[[Any], None]


@dataclass(eq=False, slots=True)
class Session:
    """One transaction: its client, and whether it has to end."""

    client: Process
    over: bool = False


@dataclass(eq=False, slots=True)
class Row:
    """The fence and the counters of one lock."""

    token: int = 0
    owner: str = ""
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GUARDS, 0))
    committed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GUARDS, 0))
    history: list[tuple[int, str]] = field(default_factory=list)
    locked_by: Session | None = None
    queue: deque[Callable[[], None]] = field(default_factory=deque)

    def lock(self, session: Session) -> bool:
        """Lock the row for a transaction; return whether that has the lock now."""
        self.locked_by = self.locked_by or session
        return self.locked_by is session

    def set(self, guard: str, value: int) -> None:
        self.counters[guard] = value
        self.committed[guard] += 1

    def lost(self, guard: str) -> int:
        """Return how many committed increments are missing from the counter."""
        return self.committed[guard] - self.counters[guard]


class Database:
    """One primary. Statements are atomic; a claimed row stays locked until its transaction ends."""

    def __init__(self, world: World, profile: Profile, faults: Faults) -> None:
        self.rows: dict[str, Row] = {}
        self._world = world
        self._profile = profile
        self._faults = faults

    def row(self, name: str) -> Row:
        return self.rows.setdefault(name, Row())

    def ask(self, client: Process, statement: Callable[..., None], *args: Any) -> Any:
        """Have a statement executed, which gets a function for its answer; it takes time on the way there and back."""
        world = self._world

        def begin(resume: Callable[[Any], None]) -> None:
            def answer(result: Any) -> None:
                world.at(world.now + self._takes(), resume, result)

            world.at(world.now + self._takes(), statement, answer, *args)

        return client.thread.call(begin)

    def _takes(self) -> float:
        random = self._world.random
        if self._faults.on and random.random() < self._profile.slow:
            return 0.01 * exp(random.uniform(0, 5.5)) * TTL
        return MOMENT * (0.5 + random.random())

    # Statements

    def read(self, answer: Answer, name: str, guard: str) -> None:
        answer(self.row(name).counters[guard])

    def write(self, answer: Answer, name: str, value: int) -> None:
        self.row(name).set(UNFENCED, value)
        answer(True)

    def claim(self, answer: Answer, session: Session, name: str, token: int, owner: str) -> None:
        """Lock a row, for which it waits; answer whether the claim holds."""
        row = self.row(name)
        if not row.lock(session):
            row.queue.append(lambda: self.claim(answer, session, name, token, owner))
        elif session.client.dead or not holds(row, token, owner):
            self.end(session, name)
            answer(False)
        else:
            answer(True)

    def commit(self, answer: Answer, session: Session, name: str, value: int, token: int, owner: str) -> None:
        row = self.row(name)
        if session.over or not row.lock(session):
            answer(False)  # rolled back before
            return
        row.token, row.owner = token, owner
        row.history.append((token, owner))
        row.set(CLAIMED, value)
        self.end(session, name)
        answer(True)

    def end(self, session: Session, name: str) -> None:
        """End a transaction and give the row to the next one."""
        session.over = True
        row = self.row(name)
        if row.locked_by is session:
            row.locked_by = None
            if row.queue:
                row.queue.popleft()()


def holds(row: Row, token: int, owner: str) -> bool:
    """Return whether a claim matches the row: a greater token, or the same token of the same owner."""
    return row.token < token or (row.token == token and row.owner == owner)


def increment(database: Database, client: Any, name: str, token: int, owner: str, guard: str) -> None:
    if guard is CLAIMED:
        increment_claimed(database, client, name, token, owner)
        return
    value = database.ask(client, database.read, name, UNFENCED)
    client.breathe()
    database.ask(client, database.write, name, value + 1)


def increment_claimed(database: Database, client: Any, name: str, token: int, owner: str) -> None:
    with transaction(client, name) as session:
        if database.ask(client, database.claim, session, name, token, owner):
            client.breathe()
            value = database.ask(client, database.read, name, CLAIMED)
            client.breathe()
            database.ask(client, database.commit, session, name, value + 1, token, owner)


@contextmanager
def transaction(client: Any, name: str) -> Iterator[Session]:
    """Yield a session that the database ends if its client dies."""
    session = Session(client)
    client.sessions.append((session, name))
    yield session
    client.sessions.remove((session, name))
