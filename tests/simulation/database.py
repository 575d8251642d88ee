"""
A database with one row per lock, three counters in it, and transactions that can take for ever.

The three counters are incremented by read, pause and write, each protected in a different way: not at all, by comparing
the token when writing, and by claiming the row with (token, owner) before reading.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import exp
from typing import Any

from .network import MOMENT, Faults
from .profiles import TTL, Profile
from .world import Call, Computer, Routine, World

UNFENCED, COMPARED, CLAIMED = "no fence", "token compared when writing", "claimed before reading"
GUARDS = (UNFENCED, COMPARED, CLAIMED)

Answer = Callable[[Any], None]


@dataclass(eq=False, slots=True)
class Session:
    """One transaction: its client, and whether it has to end."""

    client: Computer
    over: bool = False


@dataclass(eq=False, slots=True)
class Row:
    """The fence and the counters of one lock."""

    token: int = 0
    owner: str = ""
    compared: int = 0
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GUARDS, 0))
    committed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GUARDS, 0))
    history: list[tuple[int, str]] = field(default_factory=list)
    locked_by: Session | None = None
    queue: deque[Callable[[], None]] = field(default_factory=deque)

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

    # A client's statements; each is to be yielded, and returns the result

    def ask(self, statement: Callable[[Answer], None]) -> Call:
        """Execute a statement; it takes time on the way there and back."""
        world = self._world

        def begin(answer: Answer) -> None:
            def carried_out(result: Any) -> None:
                world.at(world.now + self._takes(), answer, result)

            world.at(world.now + self._takes(), statement, carried_out)

        return Call(begin)

    def read(self, name: str, guard: str) -> Call:
        return self.ask(lambda answer: answer(self.row(name).counters[guard]))

    def write(self, name: str, value: int) -> Call:
        return self.ask(lambda answer: answer(self._write(name, UNFENCED, value)))

    def compare_and_write(self, name: str, value: int, token: int) -> Call:
        """Set the counter if no greater token has written it; return whether it did."""
        return self.ask(lambda answer: answer(self._compare_and_write(name, value, token)))

    def claim(self, session: Session, name: str, token: int, owner: str) -> Call:
        """Begin a transaction with its claim; wait for the row's lock; return whether the claim holds."""
        return self.ask(
            lambda answer: self._lock(session, name, lambda: answer(self._claim(session, name, token, owner)))
        )

    def commit(self, session: Session, name: str, value: int, token: int, owner: str) -> Call:
        return self.ask(lambda answer: answer(self._commit(session, name, value, token, owner)))

    # The server's part

    def _takes(self) -> float:
        random = self._world.random
        if self._faults.on and random.random() < self._profile.slow:
            return 0.01 * exp(random.uniform(0, 5.5)) * TTL
        return MOMENT * (0.5 + random.random())

    def _write(self, name: str, guard: str, value: int) -> None:
        row = self.row(name)
        row.counters[guard] = value
        row.committed[guard] += 1

    def _compare_and_write(self, name: str, value: int, token: int) -> bool:
        row = self.row(name)
        if token < row.compared:
            return False
        row.compared = token
        self._write(name, COMPARED, value)
        return True

    def _lock(self, session: Session, name: str, then: Callable[[], None]) -> None:
        row = self.row(name)
        if row.locked_by is None:
            row.locked_by = session
            then()
        else:
            row.queue.append(lambda: self._lock(session, name, then))

    def _claim(self, session: Session, name: str, token: int, owner: str) -> bool:
        row = self.row(name)
        if session.client.dead or not holds(row, token, owner):
            self.end(session, name)
            return False
        return True

    def _commit(self, session: Session, name: str, value: int, token: int, owner: str) -> bool:
        row = self.row(name)
        if session.over or row.locked_by is not session:
            return False  # rolled back before
        row.token, row.owner = token, owner
        row.history.append((token, owner))
        self._write(name, CLAIMED, value)
        self.end(session, name)
        return True

    def end(self, session: Session, name: str) -> None:
        """End a transaction and give the row to the next one."""
        session.over = True
        row = self.row(name)
        if row.locked_by is session:
            row.locked_by = None
            if row.queue:
                row.queue.popleft()()


def holds(row: Row, token: int, owner: str) -> bool:
    """
    Return whether a claim of *owner* with *token* matches the row: a greater token, or the same token of the same
    owner.
    """
    return row.token < token or (row.token == token and row.owner == owner)


def increment(database: Database, client: Any, name: str, token: int, owner: str, guard: str) -> Routine:
    """Increment one counter of a lock under one protection; return whether that was allowed."""
    if guard is CLAIMED:
        return (yield from increment_claimed(database, client, name, token, owner))
    value = yield database.read(name, guard)
    yield client.breathe()
    if guard is UNFENCED:
        yield database.write(name, value + 1)
        return True
    return (yield database.compare_and_write(name, value + 1, token))


def increment_claimed(database: Database, client: Any, name: str, token: int, owner: str) -> Routine:
    with transaction(client, name) as session:
        if not (yield database.claim(session, name, token, owner)):
            return False
        yield client.breathe()
        value = yield database.read(name, CLAIMED)
        yield client.breathe()
        return (yield database.commit(session, name, value + 1, token, owner))


@contextmanager
def transaction(client: Any, name: str) -> Iterator[Session]:
    """Yield a session that the database ends if its client dies."""
    session = Session(client)
    client.sessions.append((session, name))
    yield session
    client.sessions.remove((session, name))
