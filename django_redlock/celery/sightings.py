"""
Ask the lock nodes for the holder of a slot, and repair a slot about which they disagree (internal).
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ..core.names import Owner, decode, secret_of, slug
from ..core.protocol import Extend, Kind, Reply, Row, Term
from ..core.rules import MIN_TTL
from ..engine.manager import LockManager
from ..exceptions import QuorumUnavailableError
from ..handler import locks
from ..inventory.actions import everywhere
from .slots import Holder, SlotState

STATE = r" \(next\) \((?:claimed|queued)\)| \(note\)"
RECORD = re.compile(rf"(.*) #([0-9a-f]{{10}})\.(\d{{1,9}})(?:{STATE})", re.ASCII | re.DOTALL)


class Record(NamedTuple):
    """
    A pending call.

    Args:
        task_id: The id of its task.
        digest: A digest of the arguments of the message that counts.
        number: The number of that message.
        task: The beginning of the task's name; tasks of one group share the records.
    """

    task_id: str
    digest: str
    number: int
    task: str


class Seen(NamedTuple):
    """
    The state of a lock's key on the nodes.

    Args:
        value: The value that a quorum has; empty if the key is free, or if no quorum has one value.
        left: Seconds until it expires, on the node where it expires first.
        nodes: How many nodes agree.
        fence: The fencing token under which it was written.
        split: The values that fewer nodes than a quorum have, newest first, if no quorum agrees on one value or on
            a free key. The nodes that did not answer may decide either way, so the lock is neither held nor free.
        reported: The report of each node if it is split, by the node's display name.
    """

    value: str
    left: float
    nodes: int
    fence: int = 0
    split: tuple["Seen", ...] = ()
    reported: tuple[tuple[str, str], ...] = ()

    @property
    def free(self) -> bool:
        """Whether a quorum of nodes has no value under the key."""
        return not self.value and not self.split

    @property
    def sightings(self) -> "tuple[Seen, ...]":
        """The values on single nodes, which prove that they were once written; newest first."""
        return (self,) if self.value else self.split

    @property
    def secret(self) -> str:
        """The holder's secret; empty if there is none."""
        return secret_of(self.value) if self.value else ""

    @property
    def owner(self) -> Owner | None:
        """The holder; None if there is none, or if another program wrote the value."""
        return decode(self.value) if self.value else None

    @property
    def record(self) -> "Record | None":
        """The pending call that the value describes; None if it describes none."""
        owner = self.owner
        if owner is None or owner.kind != "task" or not owner.ref:
            return None
        found = RECORD.fullmatch(owner.label)
        return Record(owner.ref, found[2], int(found[3]), found[1]) if found else None

    @property
    def holder(self) -> Holder:
        """The holder as an error about a taken lock would name it."""
        return Holder.described(self.owner, self.left)


FREE = Seen("", 0.0, 0)


def peek(using: str, name: str) -> Seen:
    """
    Ask the nodes for the holder of a lock, in one round trip.

    Raises:
        QuorumUnavailableError: Too few nodes answered.
    """
    return look(using, name)[0]


def look(using: str, *names: str) -> tuple[Seen, ...]:
    """
    Ask the nodes for the holders of several locks, in one round trip.

    Raises:
        QuorumUnavailableError: Too few nodes answered.
    """
    manager, slugs = locks[using], tuple(map(slug, names))
    replies = manager.survey(slugs=slugs)
    needed = manager.rules.needed
    if sum(bool(reply.rows) for reply in replies.values()) < needed:
        raise QuorumUnavailableError(names[0], nodes=_reported(manager, replies), needed=needed)
    return tuple(_seen(manager, replies, one) for one in slugs)


def undecided(using: str, name: str, seen: Seen) -> QuorumUnavailableError:
    """Return the error about a lock that is split."""
    return QuorumUnavailableError(name, nodes=dict(seen.reported), needed=locks[using].rules.needed)


def _seen(manager: LockManager, replies: Mapping[int, Reply], slug: str) -> Seen:
    rows, needed = [row for reply in replies.values() for row in reply.rows if row.slug == slug], manager.rules.needed
    votes = Counter(row.value for row in rows)
    value, most = votes.most_common(1)[0]
    if most >= needed:
        return _agreed([row for row in rows if row.value == value]) if value else FREE
    found = [_agreed([row for row in rows if row.value == value]) for value in votes if value]
    split = tuple(sorted(found, key=lambda seen: seen.fence, reverse=True))
    return FREE._replace(split=split, reported=tuple(_reported(manager, replies, slug).items()))


def _reported(manager: LockManager, replies: Mapping[int, Reply], slug: str = "") -> dict[str, str]:
    """Return what each node reports about the lock with this slug, by the node's display name."""
    reported = {manager.nodes[node].name: str(reply) for node, reply in replies.items()}
    for node, reply in replies.items():
        for row in reply.rows:
            if row.slug == slug:
                about = str(Holder.described(decode(row.value), row.left)) if row.value else str(SlotState.FREE)
                reported[manager.nodes[node].name] = about
    return reported


def _agreed(rows: list[Row]) -> Seen:
    return Seen(rows[0].value, min(row.left or 0.0 for row in rows), len(rows), min(row.fence for row in rows))


def write_back(using: str, name: str, seen: Seen) -> bool:
    """
    Write a value that too few nodes are known to have to a quorum; return whether a quorum has it now.

    A node refuses if it knows of a later holder or of a release. The value keeps its secret.

    Raises:
        QuorumUnavailableError: Too few nodes answered.
    """
    manager = locks[using]
    term = Term((slug(name),), seen.secret, seen.value, max(MIN_TTL, seen.left), seen.fence)
    request = Extend((term,), manager.rules.fence_keep)
    replies = everywhere(manager, request).replies
    kinds = [reply.terms[0][0] for reply in replies.values() if reply.terms]
    if kinds.count(Kind.HELD) >= manager.rules.needed:
        return True
    if len(kinds) < manager.rules.needed:
        raise QuorumUnavailableError(name, nodes=_reported(manager, replies), needed=manager.rules.needed)
    return False
