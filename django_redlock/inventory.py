"""
What is held, in part, or left behind: one answer for the admin, the commands and metrics.

Every node keeps an index of the names it holds, in the order of their expiry. A listing asks all nodes at once for
one page of it after the other, then for the names that only some of them reported; it never scans a key space, and
it is bounded in names and in time. A node that does not answer degrades the answer and never breaks it.

The secret of a lock never leaves this module, nor is it kept: holders are told apart by a *fingerprint*, and to
release one the nodes are asked again for the value with that fingerprint.
"""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from django.db.models import TextChoices
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from .conf import DEFAULT_ALIAS
from .core.messages import SHARED, Ballot, Kind, Release, Reply, Row, Survey
from .core.names import shown
from .core.names import slug as slug_of
from .core.owner import Owner, decode, fingerprint, nonce_of
from .core.rules import Rules
from .exceptions import QuorumUnavailableError
from .handler import locks
from .locks import LockManager
from .nodes.gather import steady

PAGE = 200  # names in one request: a script over more would block its node for a millisecond and more
MAX_NAMES = 2000  # names in one listing
MAX_SECONDS = 1.0  # after which a listing goes without the rest
LAST_SECOND = 253_402_300_799  # of the year 9999, the last that datetime knows

log = logging.getLogger("django_redlock")


class State(TextChoices):
    """
    What the nodes together say of a lock.

    ``held``: all of them have one holder. ``degraded``: a quorum has, the others have not, or do not answer.
    ``partial``: one holder, and too few nodes that say so: an attempt on its way, or what is left of one.
    ``split``: several holders, none of them with a quorum. ``no_expiry``: no quorum lets it end by itself, so it
    was not written by this library.
    """

    HELD = "held", gettext_lazy("held")
    DEGRADED = "degraded", gettext_lazy("degraded")
    PARTIAL = "partial", gettext_lazy("partial")
    SPLIT = "split", gettext_lazy("split")
    NO_EXPIRY = "no_expiry", gettext_lazy("no expiry")


class Staleness(TextChoices):
    """Why a key is stale; see :func:`stale_keys`."""

    NO_EXPIRY = "no_expiry", gettext_lazy("it has no expiry, which no lease is without: it would never end")
    TOO_LONG = "too_long", gettext_lazy("it expires later than any lease of its holder could")
    FOREIGN = "foreign", gettext_lazy("its value is not one that this library writes")
    RESIDUE = "residue", gettext_lazy("too few nodes have it, and it is older than its lease")


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """
    One node and whether it answers.

    Args:
        name: Its display name.
        answered: Whether it answered in time.
        detail: Why it did not, or why it answers and may not vote.
    """

    name: str
    answered: bool
    detail: str = ""

    @property
    def votes(self) -> bool:
        """Whether its vote counts."""
        return self.answered and not self.detail


@dataclass(frozen=True, slots=True)
class View:
    """
    One lock as one node sees it.

    Args:
        node: The node's display name.
        answered: Whether it answered in time; the rest is empty if not.
        fingerprint: Tells the holder from others; empty if the node has no key.
        owner: What the key says of its holder; None if there is no key or it is not in our format.
        left: Seconds until the key expires there; None if it has no expiry.
        fence: The highest fencing token that the node accepted for this name.
    """

    node: str
    answered: bool
    fingerprint: str = ""
    owner: Owner | None = None
    left: float | None = 0.0
    fence: int = 0


@dataclass(frozen=True, slots=True)
class HeldLock:
    """
    One lock, as all nodes together see it.

    Args:
        slug: What stands for its name in the keys.
        alias: Its alias in ``REDLOCK``.
        state: See :class:`State`.
        remaining: Seconds until the hold ends unless its holder extends it: those that a quorum of nodes grants,
            less the allowance for drift. None when no quorum has one holder, or when it never ends.
        votes: How many nodes have this holder.
        fingerprint: Tells this holder from others; safe to show.
        owner: What the keys say of the holder; None if they are not in our format.
        fencing_token: The number of this hold; 0 when the nodes no longer know.
        views: What each node of the alias has, in the order of the settings.
    """

    slug: str
    alias: str
    state: State
    remaining: float | None
    votes: int
    fingerprint: str
    owner: Owner | None
    fencing_token: int
    views: tuple[View, ...]

    @property
    def name(self) -> str:
        """The lock's name; a very long one is cut short."""
        return _shown(self.slug)

    @property
    def nodes(self) -> int:
        """How many nodes the alias has."""
        return len(self.views)

    @property
    def ttl(self) -> float | None:
        """Length of the holder's lease in seconds; None when unknown."""
        return self.owner.ttl or None if self.owner else None

    @property
    def since(self) -> float | None:
        """When the holder took it, in seconds since the epoch on the holder's clock; None when unknown."""
        return self.owner.since or None if self.owner else None

    def has_holder(self, fingerprint: str) -> bool:
        """Return whether any node has the holder with this fingerprint."""
        return bool(fingerprint) and any(view.fingerprint == fingerprint for view in self.views)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """
    The held locks of one alias at one moment.

    Args:
        alias: The alias in ``REDLOCK``.
        nodes: Its nodes, in the order of the settings.
        locks: What they hold, soonest end first; empty if too few nodes answered.
        complete: Whether these are all; a listing is bounded.
        taken: When it was made, in seconds since the epoch.
        rules: The numbers of the alias.
    """

    alias: str
    nodes: tuple[NodeStatus, ...]
    locks: tuple[HeldLock, ...]
    complete: bool
    taken: float
    rules: Rules = field(repr=False)

    @property
    def answering(self) -> int:
        """How many nodes answered."""
        return sum(node.answered for node in self.nodes)

    @property
    def has_quorum(self) -> bool:
        """Whether enough nodes answered to say what is held."""
        return self.answering >= self.rules.needed

    @property
    def quorum(self) -> str:
        """How many nodes answer and how many are needed, in words."""
        counts = {"answering": self.answering, "nodes": len(self.nodes), "needed": self.rules.needed}
        have = _("%(answering)d of %(nodes)d nodes answer; %(needed)d needed.") % counts
        return f"{have} {self._outlook()}"

    @property
    def trouble(self) -> str:
        """Which nodes do not answer or may not vote, and why; empty if all do."""
        return ", ".join(f"{node.name} ({node.detail})" for node in self.nodes if not node.votes)

    def _outlook(self) -> str:
        spare = sum(node.votes for node in self.nodes) - self.rules.needed
        if not self.has_quorum:
            return _("Too few to say which locks are held, or to take one.")
        if spare < 0:
            return _("Too few of them may vote: no lock can be taken.")
        if spare == 0:
            return _("No other may fail.")
        return ngettext("%(spare)d more may fail.", "%(spare)d more may fail.", spare) % {"spare": spare}


@dataclass(frozen=True, slots=True)
class StaleKey:
    """
    A key that no live holder needs and that keeps others out, or would for too long.

    Args:
        lock: The lock whose name it has.
        fingerprint: Tells its value from others.
        reason: Why it is stale.
        nodes: The nodes that have it.
        owner: What it says of its holder, if it is in our format.
    """

    lock: HeldLock
    fingerprint: str
    reason: Staleness
    nodes: tuple[str, ...]
    owner: Owner | None

    @property
    def since(self) -> float | None:
        """When it was written, in seconds since the epoch; None when unknown."""
        return self.owner.since or None if self.owner else None


# What callers ask


def held_locks(using: str = DEFAULT_ALIAS) -> Snapshot:
    """
    Return the locks held now and which nodes say so; blocks for about a second at most.

    Raises:
        InvalidRedlockError: The alias cannot be used.
    """
    poll = _Poll(locks[using])
    _ask(poll, poll.pages())
    return poll.snapshot()


async def aheld_locks(using: str = DEFAULT_ALIAS) -> Snapshot:
    """Do what :func:`held_locks` does without blocking."""
    poll = _Poll(locks[using])
    await _aask(poll, poll.pages())
    return poll.snapshot()


def find_locks(slugs: Iterable[str], using: str = DEFAULT_ALIAS) -> Snapshot:
    """
    Return the same for some locks only, by their slugs; asks each node once per 200 of them.

    Raises:
        InvalidRedlockError: The alias cannot be used.
    """
    poll = _Poll(locks[using])
    _ask(poll, poll.named(list(slugs)))
    return poll.snapshot()


def find_lock(name: str, using: str = DEFAULT_ALIAS) -> HeldLock | None:
    """
    Return a lock as the nodes see it, or None if it is free.

    Raises:
        QuorumUnavailableError: Too few nodes answered to tell.
        InvalidRedlockError: The alias cannot be used.
    """
    snapshot = find_locks([slug_of(name)], using)
    if not snapshot.has_quorum:
        said = {node.name: node.detail or "answered" for node in snapshot.nodes}
        raise QuorumUnavailableError(name, 0.0, 1, said, snapshot.rules.needed)
    return snapshot.locks[0] if snapshot.locks else None


def stale_keys(snapshot: Snapshot, now: float | None = None) -> list[StaleKey]:
    """
    Return the keys among *snapshot* that no live holder needs.

    A key is stale when it has no expiry, when it expires later than any lease of its holder could, when its value
    is not ours, or when too few nodes have it and it is older than its lease. What a quorum holds is never stale,
    nor is what a quorum may hold, counting every node that did not answer, nor what was renewed in the last half
    of its lease: its holder lost some nodes and is about to put it back.

    Args:
        snapshot: A listing.
        now: The time in seconds since the epoch; None is now.
    """
    moment = time.time() if now is None else now
    return [key for lock in snapshot.locks for key in _stale(lock, snapshot.rules, moment)]


def remove_stale(key: StaleKey) -> str:
    """
    Delete a stale key from the nodes that have it, if it is still there and still stale.

    Returns:
        ``removed``; ``changed`` if it is gone, or no longer stale; ``failed`` if a node that has it may still have it.
    """
    slug = key.lock.slug
    poll = _Poll(locks[key.lock.alias])
    _ask(poll, poll.named([slug]))
    again = [each for each in stale_keys(poll.snapshot()) if each.fingerprint == key.fingerprint]
    ballot = _release(poll, slug, key.fingerprint, bury=0.0) if again else None
    if ballot is None:
        return "changed"
    having = [place for place, row in poll.seen(slug).items() if fingerprint(row.value) == key.fingerprint]
    kinds = {ballot.replies[place].kind if place in ballot.replies else Kind.UNKNOWN for place in having}
    if kinds <= {Kind.RELEASED, Kind.GONE}:
        return "removed"
    return "changed" if kinds <= {Kind.RELEASED, Kind.GONE, Kind.BUSY} else "failed"


def force_release(name: str, fingerprint: str, using: str = DEFAULT_ALIAS, *, slug: str = "") -> str:
    """
    Release a lock whoever holds it, if the holder is still the one with this fingerprint.

    The holder learns of it at its next renewal, which is refused: its lease is lost, and the lock stays free for
    others. Sends the signal ``lock_forced``.

    Args:
        name: The lock's name.
        fingerprint: Which holder it was when somebody decided to release it.
        using: The alias in ``REDLOCK``.
        slug: The lock's slug, for a long name of which only the beginning is known.

    Returns:
        ``released``; ``changed`` if somebody else holds it now; ``gone`` if nobody does; ``unknown`` if too few
        nodes answered to tell.

    Raises:
        InvalidRedlockError: The alias cannot be used.
    """
    manager, slug = locks[using], slug or slug_of(name)
    poll = _Poll(manager)
    _ask(poll, poll.named([slug]))
    ballot = _release(poll, slug, fingerprint, bury=_burial(poll, slug, fingerprint))
    if ballot is None:
        return _absence(poll, slug)
    outcome = _outcome(ballot, manager.rules)
    log.warning(
        "lock released by force: %s (%s)",
        _shown(slug),
        outcome,
        extra={"event": "lock_forced", "lock": _shown(slug), "outcome": outcome},
    )
    manager.notify("lock_forced", name=_shown(slug), outcome=outcome)
    return outcome


def printable(text: str) -> str:
    """Return *text* with everything that could move a cursor or hide in a page written as an escape."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


# How the nodes are asked


class _Poll:
    """The questions of one listing and what the nodes answered; a silent node's answers do not count."""

    def __init__(self, manager: LockManager) -> None:
        self.manager = manager
        self.rows: dict[str, dict[int, Row]] = {}
        self.silent: dict[int, str] = {}
        self.total = 0
        self.complete = True

    def pages(self) -> Iterator[Survey]:
        """Yield the requests for the whole index, then for the names that not every node reported."""
        for offset in range(0, MAX_NAMES, PAGE):
            yield Survey(offset=offset, size=PAGE)
            if offset + PAGE >= self.total:
                break
        else:
            self.complete = False
        yield from self.named(self._doubtful())

    def named(self, slugs: list[str]) -> Iterator[Survey]:
        """Yield the requests for some names."""
        for start in range(0, len(slugs), PAGE):
            yield Survey(slugs=tuple(slugs[start : start + PAGE]))

    def receive(self, replies: Mapping[int, Reply], elapsed: float) -> None:
        """Take the answers to one request; *elapsed* seconds have passed since it was sent."""
        for node in range(len(self.manager.nodes)):
            reply = replies.get(node)
            if reply is None or reply.kind is not Kind.LISTED:
                self.silent[node] = str(reply) if reply else "timeout"
                continue
            self.total = max(self.total, reply.total)
            for row in reply.rows:
                self.rows.setdefault(row.slug, {})[node] = _aged(row, elapsed)

    def seen(self, slug: str) -> dict[int, Row]:
        """Return what each answering node has under a name; without those that have nothing."""
        rows = self.rows.get(slug, {})
        return {node: row for node, row in rows.items() if node not in self.silent and _present(row)}

    def snapshot(self) -> Snapshot:
        """Return what was learned."""
        enough = len(self.manager.nodes) - len(self.silent) >= self.manager.rules.needed
        listed = [self._lock(slug) for slug in self.rows if self.seen(slug)] if enough else []
        return Snapshot(
            alias=self.manager.alias,
            nodes=tuple(self._status(place) for place in range(len(self.manager.nodes))),
            locks=tuple(sorted(listed, key=_soonest_first)),
            complete=self.complete,
            taken=time.time(),
            rules=self.manager.rules,
        )

    def _doubtful(self) -> list[str]:
        answering = len(self.manager.nodes) - len(self.silent)
        return [slug for slug, rows in self.rows.items() if self.seen(slug) and len(rows) < answering]

    def _status(self, place: int) -> NodeStatus:
        name = self.manager.nodes[place].name
        if place in self.silent:
            return NodeStatus(name, False, self.silent[place])
        return NodeStatus(name, True, self.manager.admission.objection(place))

    def _view(self, place: int, slug: str) -> View:
        name = self.manager.nodes[place].name
        if place in self.silent:
            return View(name, False)
        row = self.rows[slug].get(place)
        if row is None or not _present(row):
            return View(name, True, fence=row.fence if row else 0)
        return View(name, True, fingerprint(row.value), _owner(row.value), row.left, row.fence)

    def _lock(self, slug: str) -> HeldLock:
        views = tuple(self._view(place, slug) for place in range(len(self.manager.nodes)))
        return _judge(slug, self.manager.alias, views, self.manager.rules)


def _ask(poll: _Poll, questions: Iterator[Survey]) -> None:
    started = steady()
    for question in questions:
        sent = steady()
        if sent - started > MAX_SECONDS:
            poll.complete = False
            return
        replies = poll.manager.survey(slugs=question.slugs, offset=question.offset, count=question.size)
        poll.receive(replies, steady() - sent)


async def _aask(poll: _Poll, questions: Iterator[Survey]) -> None:
    started = steady()
    for question in questions:
        sent = steady()
        if sent - started > MAX_SECONDS:
            poll.complete = False
            return
        replies = await poll.manager.asurvey(slugs=question.slugs, offset=question.offset, count=question.size)
        poll.receive(replies, steady() - sent)


def _release(poll: _Poll, slug: str, wanted: str, bury: float) -> Ballot | None:
    """Delete what has the fingerprint *wanted* on every node; None if no node has it."""
    nonces = {nonce_of(row.value) for row in poll.seen(slug).values() if fingerprint(row.value) == wanted}
    if not nonces:
        return None
    manager = poll.manager
    nonce = nonces.pop()
    request = Release((slug,), nonce, bury, shared=nonce == SHARED)
    everywhere = dict.fromkeys(range(len(manager.nodes)), request)
    ballot = Ballot(everywhere, lambda replies: False, manager.rules.timeout(manager.rules.ttl), farewell=True)
    manager.ask(ballot)
    return ballot


def _burial(poll: _Poll, slug: str, wanted: str) -> float:
    """
    Return for how long the nodes refuse the holder after a release by force, in seconds.

    A living holder's next renewal would put back the keys that it finds missing. It comes within one lease. A lease
    beyond ``max_ttl`` is a place that nobody renews; whoever takes it over later must not be refused.
    """
    rules = poll.manager.rules
    owners = [_owner(row.value) for row in poll.seen(slug).values() if fingerprint(row.value) == wanted]
    ttl = max((owner.ttl for owner in owners if owner), default=0.0) or rules.ttl
    return ttl + rules.drift(ttl) if ttl <= rules.max_ttl else 0.0


def _absence(poll: _Poll, slug: str) -> str:
    if poll.seen(slug):
        return "changed"
    return "gone" if poll.snapshot().has_quorum else "unknown"


def _outcome(ballot: Ballot, rules: Rules) -> str:
    # As many nodes as a quorum say that it is not there any more: the silent ones cannot be a quorum.
    if ballot.count(Kind.RELEASED, Kind.GONE, Kind.BUSY) < rules.needed:
        return "unknown"
    if ballot.count(Kind.RELEASED):
        return "released"
    return "changed" if ballot.count(Kind.BUSY) else "gone"


# What the answers mean


def _judge(slug: str, alias: str, views: tuple[View, ...], rules: Rules) -> HeldLock:
    """Return the lock that the views of all nodes make together."""
    groups = _by_holder(views)
    leader = max(groups.values(), key=lambda group: (len(group), _weight(group)))
    votes = len(leader)
    won = votes >= rules.needed
    owner = next((view.owner for view in leader if view.owner), None)
    left = _granted(leader, rules.needed) if won else None
    drift = rules.drift(owner.ttl if owner and owner.ttl else rules.ttl)
    return HeldLock(
        slug=slug,
        alias=alias,
        state=_state(votes, len(views), len(groups), won, left),
        remaining=None if left is None else max(0.0, left - drift),
        votes=votes,
        fingerprint=leader[0].fingerprint,
        owner=owner,
        fencing_token=_token(leader),
        views=views,
    )


def _state(votes: int, nodes: int, holders: int, won: bool, left: float | None) -> State:
    if not won:
        return State.SPLIT if holders > 1 else State.PARTIAL
    if left is None:
        return State.NO_EXPIRY
    return State.HELD if votes == nodes else State.DEGRADED


def _by_holder(views: Iterable[View]) -> dict[str, list[View]]:
    groups: dict[str, list[View]] = {}
    for view in views:
        if view.fingerprint:
            groups.setdefault(view.fingerprint, []).append(view)
    return groups


def _granted(group: list[View], needed: int) -> float | None:
    """Return for how long a quorum grants the lock, which is its longest time but *needed* - 1; None is for ever."""
    lefts = sorted((math.inf if view.left is None else view.left for view in group), reverse=True)
    return None if math.isinf(lefts[needed - 1]) else lefts[needed - 1]


def _weight(group: list[View]) -> float:
    return sum(math.inf if view.left is None else view.left for view in group)


def _token(group: list[View]) -> int:
    """Return the number that most nodes of the holder accepted; a node may have seen a higher one that failed."""
    fences = [view.fence for view in group]
    return max(fences, key=lambda fence: (fences.count(fence), fence))


def _stale(lock: HeldLock, rules: Rules, now: float) -> Iterator[StaleKey]:
    silent = sum(not view.answered for view in lock.views)
    for holder, group in _by_holder(lock.views).items():
        owner = next((view.owner for view in group if view.owner), None)
        longest = max(rules.max_ttl, owner.ttl if owner else 0.0)
        longest += rules.drift(longest)
        sound = [view.left for view in group if view.left is not None and view.left <= longest]
        if len(sound) + silent >= rules.needed or _renewed(owner, sound):
            continue
        reason = _reason(group, owner, longest, now)
        if reason:
            yield StaleKey(lock, holder, reason, tuple(view.node for view in group), owner)


def _renewed(owner: Owner | None, lefts: list[float]) -> bool:
    return owner is not None and any(left > owner.ttl / 2 for left in lefts)


def _reason(group: list[View], owner: Owner | None, longest: float, now: float) -> Staleness | None:
    if any(view.left is None for view in group):
        return Staleness.NO_EXPIRY
    if any(view.left is not None and view.left > longest for view in group):
        return Staleness.TOO_LONG
    if owner is None:
        return Staleness.FOREIGN
    return Staleness.RESIDUE if owner.since and now - owner.since > owner.ttl else None


def _soonest_first(lock: HeldLock) -> tuple[float, str]:
    return (math.inf if lock.remaining is None else lock.remaining, lock.slug)


def _present(row: Row) -> bool:
    return row.left is None or row.left >= 0


def _aged(row: Row, elapsed: float) -> Row:
    """Return a row as it is by now: the node may have answered as soon as it was asked."""
    return row._replace(left=max(0.0, row.left - elapsed)) if row.left is not None and row.left >= 0 else row


def _owner(value: str) -> Owner | None:
    """Return the owner that a value describes, in numbers that can be shown; anybody can write to a node."""
    owner = decode(value)
    if owner is None:
        return None
    since = owner.since if 0 < owner.since < LAST_SECOND else 0.0
    return replace(owner, since=since, ttl=owner.ttl if 0 < owner.ttl < LAST_SECOND else 0.0)


def _shown(slug: str) -> str:
    try:
        return shown(slug)
    except ValueError:  # somebody else wrote into the index
        return slug
