"""
Ask every node which locks it has, and count the nodes' votes (internal).

A :class:`Poll` sends the requests of one listing and files the replies. Its :meth:`~Poll.tally` is the one place that
says which holder has a quorum. Each request follows from the replies to the ones before it, so the blocking and the
asyncio callers share all of this, and differ in :func:`run` and :func:`arun` alone.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, Unpack

from ..core.names import (
    HEARTBEAT,
    Owner,
    decode,
    fingerprint,
    fingerprint_of_sharers,
    heartbeat,
    is_kept,
    lease_of,
    process_of,
    secret_of,
)
from ..core.protocol import (
    ABSENT,
    ENDLESS,
    PERMITS,
    SHARED,
    Extend,
    Kind,
    Release,
    Repair,
    Reply,
    Row,
    is_absurd,
    without_secrets,
)
from ..core.round import Round, SurveyOptions
from ..core.rules import EXPIRY_ROUNDING
from ..core.votes import agreed, is_quorum
from ..engine.manager import LockManager
from ..engine.presence import LIFE
from ..exceptions import QuorumUnavailableError
from .model import (
    LAST_SECOND,
    MAX_TEXT,
    NO_STRING,
    Life,
    LockReport,
    NodeStatus,
    OddKey,
    Snapshot,
    State,
    View,
    Waiting,
    owner_of,
)

PAGE = 50  # names in one request, which costs a node a quarter of a millisecond, or twice that when it is busy
MAX_NAMES = 1000  # names in one listing, unless asked for more
MAX_SECONDS = 0.5  # after this time, a listing leaves out the rest
SILENT_NODE = 0.75  # seconds that a listing waits for a silent node at most, even if the node timeout is longer


Requests = Generator[SurveyOptions, Mapping[int, Reply], None]
"""The requests of a poll; the replies to each of them decide about the next one."""


def ask_nodes(manager: LockManager, slugs: Iterable[str]) -> "Poll":
    """Ask every node about the locks with these slugs, the forms of their names in the keys: fifty in a round trip."""
    poll = Poll(manager)
    return run(poll, poll.named(slugs))


async def aask_nodes(manager: LockManager, slugs: Iterable[str]) -> "Poll":
    """Do what :func:`ask_nodes` does without blocking."""
    poll = Poll(manager)
    return await arun(poll, poll.named(slugs))


def tell_nodes(manager: LockManager, request: Release | Extend | Repair, nodes: Iterable[int] | None = None) -> Round:
    """Send a request to all nodes, or to some of them, and wait for each reply."""
    requests = dict.fromkeys(range(len(manager.nodes)) if nodes is None else nodes, request)
    round = Round.to_tell(requests, manager.rules.timeout(manager.rules.ttl))
    manager.driver.ask(round)
    return round


@without_secrets
class Vote(NamedTuple):
    """
    One holder of a lock, and the nodes that have it.

    Args:
        value: The value under the lock's key; that of the first node if they have different ones of this holder.
        rows: What each of these nodes reported, by its index.
        lefts: The seconds for which each of them keeps the value from the moment of the tally on; infinity for ever.
    """

    value: str
    rows: dict[int, Row]
    lefts: list[float]

    @property
    def nodes(self) -> int:
        """How many nodes have the holder."""
        return len(self.rows)

    @property
    def secret(self) -> str:
        """The holder's secret, which must never be shown; all of the value if another program wrote it."""
        return secret_of(self.value)

    @property
    def fingerprint(self) -> str:
        """
        Distinguishes the holder from others; safe to show.

        The key of a shared lock does not name its holders, so the fingerprint changes whenever another holder joins.
        """
        return fingerprint_of_sharers(self.last) if self.secret == SHARED else read_value(self.value)[0]

    @property
    def about(self) -> str:
        """The description of the holder; empty if another program wrote the value."""
        texts = [about for row in self.rows.values() if (about := read_value(row.value)[1])]
        # A node that was away at the end of the work knows only that the work had begun.
        return next(filter(is_kept, texts), texts[0] if texts else "")

    @property
    def owner(self) -> Owner | None:
        """The holder, as the value describes it; None if another program wrote the value."""
        return decode(self.value)

    @property
    def owners(self) -> list[Owner]:
        """The holder as each of these nodes describes it, within the bounds of what can be shown."""
        return [owner for row in self.rows.values() if (owner := owner_of(read_value(row.value)[1]))]

    @property
    def last(self) -> int:
        """The highest fencing token that one of these nodes accepted."""
        return max([row.fence for row in self.rows.values()])

    @property
    def fencing_token(self) -> int:
        """The token that most of these nodes accepted; a node may have accepted a higher one in vain."""
        fences = [row.fence for row in self.rows.values()]
        if fences.count(fences[0]) == len(fences):
            return fences[0]
        return max(fences, key=lambda fence: (fences.count(fence), fence))

    def left(self, needed: int) -> float:
        """Return for how many seconds *needed* nodes keep the value; infinity for ever, and 0 if fewer have it."""
        return agreed(self.lefts, needed)


class Tally(NamedTuple):
    """
    What the nodes report about one lock, and who holds it by their votes.

    Args:
        votes: Each holder that a node reports; first the one with the most nodes, and the longest time left.
        free: How many nodes answered that nobody holds the lock.
        silent: How many nodes did not answer.
        needed: How many nodes a quorum has.
    """

    votes: tuple[Vote, ...]
    free: int
    silent: int
    needed: int

    @property
    def winner(self) -> Vote | None:
        """The holder that a quorum of the nodes reports; None if there is none."""
        return self.votes[0] if self.votes and is_quorum(self.votes[0].nodes, self.needed) else None

    @property
    def is_free(self) -> bool:
        """Whether a quorum of the nodes reports that nobody holds the lock."""
        return is_quorum(self.free, self.needed)

    @property
    def possible(self) -> tuple[Vote, ...]:
        """The holders that would have a quorum if all silent nodes had them, too."""
        return tuple(vote for vote in self.votes if is_quorum(vote.nodes + self.silent, self.needed))


class Poll:
    """
    The requests of one survey and the nodes' replies; a silent node is not asked again, and does not count.

    Args:
        manager: The manager of the nodes.
        waiters: How many waiters to name at most in each request; 0 only counts them and the holders that share a lock,
            and None, the default, does neither.
    """

    def __init__(self, manager: LockManager, waiters: int | None = None) -> None:
        self.manager = manager
        self.silent: dict[int, str] = {}  # the nodes that did not answer, and why
        self.complete = True  # whether no lock is left out
        self.absurd: defaultdict[str, set[int]] = defaultdict(set)  # by slug, the nodes with an absurd fencing token
        self._odd: dict[tuple[int, str], str] = {}  # by node and key, the slug of the lock that the key keeps from all
        self._waiters = waiters
        # Each row with the times of the request and of the reply.
        self._rows: defaultdict[str, dict[int, tuple[Row, float, float]]] = defaultdict(dict)
        self._refusing: dict[int, str] = {}  # the nodes that would not write, and why
        self._total = 0
        self._lasting: set[str] = set()  # the names that some node holds
        self._heard: defaultdict[str, dict[int, float]] = defaultdict(dict)  # by process, seconds since its last sign
        self._suspects: dict[str, str] = {}  # by slug, the process of a lock that nobody seems to extend
        self._locks: list[LockReport] | None = None
        self._started = 0.0  # when a listing began, plus the time that it waited for silent nodes
        self._patience = math.inf

    # The results

    @property
    def has_quorum(self) -> bool:
        """Whether enough nodes answered to tell who holds the locks."""
        return is_quorum(len(self.manager.nodes) - len(self.silent), self.manager.rules.needed)

    @property
    def reported(self) -> dict[str, str]:
        """Whether each node answered, and if not, why, by the node's display name."""
        return {node.name: self.silent.get(index, "answered") for index, node in enumerate(self.manager.nodes)}

    def require_quorum(self, name: str) -> None:
        """
        Check that enough nodes answered to tell who holds the lock *name*.

        Raises:
            QuorumUnavailableError: Too few nodes answered.
        """
        if not self.has_quorum:
            raise QuorumUnavailableError(name, nodes=self.reported, needed=self.manager.rules.needed)

    def tally(self, slug: str, by: Callable[[str], str] = secret_of) -> Tally:
        """
        Count the nodes' votes on the holder of one lock.

        Args:
            slug: The form of the lock's name in the keys.
            by: The part of the value that is the same where two nodes report the same holder: the secret, or with
                ``str`` all of it.
        """
        now = self.manager.runtime.clock()
        found: dict[str, Vote] = {}
        for node, (row, sent, heard) in self._rows[slug].items() if slug in self._rows else ():
            # The node answered between the request and the reply. A key certainly lasts for its time, counted from the
            # request; it has certainly ended when that time, which servers round down, has passed since the reply.
            told = math.inf if row.left is None else row.left
            if told + EXPIRY_ROUNDING >= now - heard and node not in self.silent:
                left, holder = max(0.0, told - (now - sent)), by(row.value)
                if holder in found:
                    found[holder].rows[node] = row
                    found[holder].lefts.append(left)
                else:
                    found[holder] = Vote(row.value, {node: row}, [left])
        votes = [*found.values()]
        if len(votes) > 1:
            votes.sort(key=lambda vote: (vote.nodes, sum(vote.lefts)), reverse=True)
        silent = len(self.silent)
        free = len(self.manager.nodes) - silent - sum([len(vote.rows) for vote in votes])
        return Tally(tuple(votes), free, silent, self.manager.rules.needed)

    def vote(self, slug: str, fingerprint: str) -> Vote | None:
        """Return the holder with this fingerprint; None if no node reports it."""
        return next((vote for vote in self.tally(slug).votes if vote.fingerprint == fingerprint), None)

    def fence(self, slug: str) -> int:
        """Return the highest fencing token that any node knows for a name, apart from absurd ones."""
        return max([row.fence for row, *_ in self._rows[slug].values()], default=0)

    def snapshot(self) -> Snapshot:
        """Return the locks and the state of the nodes, as far as the answers show them."""
        manager = self.manager
        listed = (self._locks or self._judged()) if self.has_quorum else []
        if self._suspects:
            now = manager.runtime.wall()
            lives = {slug: self._life(process) for slug, process in self._suspects.items()}
            listed = [lock.of_process(lives[lock.slug], now) if lock.slug in lives else lock for lock in listed]
        return Snapshot(
            alias=manager.alias,
            nodes=tuple(self._status(index) for index in range(len(manager.nodes))),
            locks=tuple(sorted(listed, key=lambda lock: (lock.remaining is None, lock.remaining, lock.slug))),
            complete=self.complete,
            taken=manager.runtime.wall(),
            rules=manager.rules,
            total=self._total,
            absurd={
                slug: tuple(manager.nodes[index].name for index in sorted(indexes))
                for slug, indexes in self.absurd.items()
            },
            wrong_type=tuple(
                OddKey(slug, manager.nodes[index].name, key)
                for (index, key), slug in sorted(self._odd.items())
                if index not in self.silent
            ),
        )

    def _status(self, index: int) -> NodeStatus:
        name = self.manager.nodes[index].name
        if index in self.silent:
            return NodeStatus(name, False, self.silent[index])
        return NodeStatus(name, True, self.manager.driver.admission.objection(index) or self._refusing.get(index, ""))

    # The requests

    def named(self, slugs: Iterable[str]) -> Requests:
        """Yield the requests for some names, whose number bounds the time."""
        names, nodes = tuple(slugs), range(len(self.manager.nodes))
        for start in range(0, len(names), PAGE):
            yield from self._ask(nodes, slugs=names[start : start + PAGE])

    def described(self, slugs: Iterable[str]) -> Requests:
        """Yield the requests for some names, and for the processes of locks that nobody extends."""
        yield from self.named(slugs)
        yield from self._processes()

    def pages(self, limit: int, seconds: float, also: Iterable[str] = (), sharers: int = 1) -> Requests:
        """
        Yield the requests for the whole index, then for the names that not every node reported.

        Args:
            limit: How many names to ask for, about.
            seconds: For how long to send requests, about.
            also: The slugs to ask for by name if the listing is cut short.
            sharers: How many listings run at once. They share a processor, so each has the time of all of them.
        """
        self._started = self.manager.runtime.clock()
        self._patience = max(seconds, SILENT_NODE)
        seconds *= sharers
        cursors = yield from self._page(dict.fromkeys(range(len(self.manager.nodes)), ""))
        if cursors:  # locks that never end come last in the indexes, and somebody must see to them
            yield from self._page(dict.fromkeys(cursors, ENDLESS))
            lasting = [
                slug for slug in self._doubtful() if any(row.left is None for row, *_ in self._rows[slug].values())
            ]
            yield from self.named(lasting)
        while cursors and self._is_in_time(seconds) and len(self._lasting) < limit:
            cursors = yield from self._page(cursors)
        if cursors:
            self.complete = False
            yield from self.named(also)
        doubtful = self._doubtful()
        while doubtful and self._is_in_time(seconds):
            yield from self.named(doubtful[:PAGE])
            doubtful = doubtful[PAGE:]
        for slug in doubtful:
            self.complete = False
            del self._rows[slug]  # not every node was asked about it, so its state is unknown
        if self._is_in_time(seconds):
            yield from self._processes()

    def _page(self, cursors: dict[int, str]) -> Generator[SurveyOptions, Mapping[int, Reply], dict[int, str]]:
        """Yield the request for a page of each node's index; return where the next page of each starts, if any."""
        replies = yield from self._ask(cursors, count=PAGE, after=cursors)
        following = {}
        for node, reply in replies.items():
            cursor = reply.cursor
            if reply.rows and all(row.left == ABSENT for row in reply.rows):
                cursor = after_ended(cursor, reply.time)
            if cursor and cursor == cursors[node]:  # the page has only names that are not ours
                self.complete = False
            elif cursor:
                following[node] = cursor
        return following

    def _processes(self) -> Requests:
        """Yield the requests that show whether the processes of locks that nobody extends are alive."""
        self._locks = self._judged()  # possible now that all nodes have answered
        self._suspects = {lock.slug: lock.process for lock in self._locks if lock.is_suspicious}
        known = {process for process in self._heard if self._life(process) is Life.LIVING}
        yield from self.named([heartbeat(process) for process in sorted({*self._suspects.values()} - known)])

    def _ask(
        self, nodes: Iterable[int], **options: Unpack[SurveyOptions]
    ) -> Generator[SurveyOptions, Mapping[int, Reply], dict[int, Reply]]:
        """Yield one request for those of *nodes* that are not silent; file and return the replies."""
        asked, sent = [node for node in nodes if node not in self.silent], self.manager.runtime.clock()
        if not asked:
            return {}
        # A node that was silent once is left out from now on. A listing takes up to twenty requests. If each of them
        # waited for that node again, one node that is down would cut every listing short.
        but = {*range(len(self.manager.nodes))}.difference(asked)
        replies = yield {**options, "waiters": self._waiters, "but": but, "patience": self._patience}
        listed, silent = {}, len(self.silent)
        for node in asked:
            reply = replies.get(node)
            if reply is None or reply.kind is not Kind.LISTED:
                self.silent[node] = str(reply) if reply else "timeout"
                continue
            listed[node] = reply
            self._total = max(self._total, reply.total)
            if reply.detail:
                self._refusing[node] = reply.detail
            self._file(node, reply, sent)
        if len(self.silent) > silent:  # waiting for that node took the time that the others need
            self._started += self.manager.runtime.clock() - sent
        return listed

    def _is_in_time(self, seconds: float) -> bool:
        return self.manager.runtime.clock() - self._started <= seconds

    def _doubtful(self) -> list[str]:
        """Return the slugs of held locks about which some node has not said anything yet."""
        answering = len(self.manager.nodes) - len(self.silent)
        return [slug for slug, rows in self._rows.items() if len(rows) < answering and self.tally(slug).votes]

    def _file(self, node: int, reply: Reply, sent: float) -> None:
        """File the rows of a node; an absurd fencing token is noted separately and is no token of the lock."""
        filed, lasting, now = self._rows, self._lasting, self.manager.runtime.clock()
        trusted = not is_absurd(max([row.fence for row in reply.rows], default=0), reply.time)
        for row in reply.rows:
            slug = row.slug
            if slug.endswith(HEARTBEAT):
                self._heard[process_of(slug)][node] = since_sign(row)
                continue
            if not trusted and is_absurd(row.fence, reply.time):
                self.absurd[slug].add(node)
                row = row._replace(fence=0)
            for key in row.odd:
                self._odd.setdefault((node, key), slug)  # a queue belongs to several permits
            if row.left != ABSENT:
                lasting.add(slug)
            filed[slug][node] = (row, sent, now)

    def _life(self, process: str) -> Life:
        """Return what the answering nodes know about a process."""
        heard = [ago for node, ago in self._heard.get(process, {}).items() if node not in self.silent]
        last = min(heard, default=math.inf)
        if last <= LIFE:
            return Life.LIVING
        if not is_quorum(len(heard), self.manager.rules.needed):
            return Life.UNKNOWN
        return Life.SILENT if last < math.inf else Life.GONE

    # The locks

    def _judged(self) -> list[LockReport]:
        return [lock for slug in self._rows if (lock := self._judge(slug))]

    def _judge(self, slug: str) -> LockReport | None:
        """Combine what the nodes report about a name into one lock; return None if no answering node holds it."""
        tally, rules = self.tally(slug), self.manager.rules
        if not tally.votes or tally.votes[0].value.startswith(PERMITS):  # the permits themselves are listed
            return None
        leader, about = tally.votes[0], tally.votes[0].about
        ttl = lease_of(about)[0]
        ttl = ttl if 0 < ttl < LAST_SECOND else 0.0
        left = leader.left(rules.needed) if tally.winner else math.inf
        if not tally.winner:
            state = State.SPLIT if len(tally.votes) > 1 else State.PARTIAL
        elif left == math.inf:
            state = State.NO_EXPIRY
        else:
            state = State.HELD if leader.nodes == rules.nodes else State.DEGRADED
        kept = left < math.inf and is_kept(about)
        rows = [row for node, (row, *_) in self._rows[slug].items() if node not in self.silent]
        queues = [row.waiters for row in rows if row.waiting]
        waiters = in_turn(queues) if queues else ()
        return LockReport(
            slug,
            self.manager.alias,
            state,
            # Nobody relies on the lease of a lock that is only kept, so nothing is allowed for drift.
            None if left == math.inf else left if kept else max(0.0, left - rules.drift(ttl or rules.ttl)),
            leader.nodes,
            leader.fingerprint,
            about,
            ttl or None,
            leader.fencing_token,
            self._views(slug, tally),
            waiters,
            max(len(waiters), *[row.waiting for row in rows]),
            min([row.since for row in rows if row.since], default=0) / 1e6,
            sharers=agreed([row.sharers for row in rows if row.sharers], rules.needed),
            kept_until=min(self.manager.runtime.wall() + left, LAST_SECOND) if kept else 0.0,
        )

    def _views(self, slug: str, tally: Tally) -> tuple[View, ...]:
        """Return what each node reports about a name."""
        nodes, rows, views = self.manager.nodes, self._rows[slug], {}
        for vote in tally.votes:
            mark = vote.fingerprint
            for (node, row), left in zip(vote.rows.items(), vote.lefts, strict=True):
                ends = None if left == math.inf else left
                views[node] = View(nodes[node].name, True, mark, read_value(row.value)[1], ends, row.fence)
        for index in range(len(nodes)) if len(views) < len(nodes) else ():
            if index not in views:
                fence = rows[index][0].fence if index in rows and index not in self.silent else 0
                views[index] = View(nodes[index].name, index not in self.silent, fence=fence)
        return tuple([views[index] for index in range(len(nodes))])


def run(poll: Poll, requests: Requests) -> Poll:
    """Send the requests of a poll, and return the poll with the replies."""
    with suppress(StopIteration):
        request = next(requests)
        while True:
            request = requests.send(poll.manager.survey(**request))
    return poll


async def arun(poll: Poll, requests: Requests) -> Poll:
    """Do what :func:`run` does without blocking."""
    with suppress(StopIteration):
        request = next(requests)
        while True:
            request = requests.send(await poll.manager.asurvey(**request))
    return poll


def after_ended(cursor: str, time: int) -> str:
    """
    Return where to continue after a page of locks that have all ended: at the first lock that may still be held.

    Names of ended locks stay in an index until later locks push them out. Thousands of them would use up the time of a
    listing.

    Args:
        cursor: Where the node would continue: a moment and a name. Servers count milliseconds, in-memory nodes seconds.
        time: The time on the node's clock, in microseconds.
    """
    try:
        moment = float(cursor.partition(" ")[0])
    except ValueError:
        return cursor
    now = time // 1000 if moment > time / 1e5 else time / 1e6
    return f"{now!r} " if moment < now else cursor


@lru_cache(maxsize=4096)
def read_value(value: str) -> tuple[str, str]:
    """
    Return the fingerprint of a value and its description of the holder, which is empty if the value is not ours.

    The cache helps because every node has the same value, and so has the next page that somebody loads.
    """
    if "\ufffd" in secret_of(value):  # bytes that are no text, which no request of this library can name
        return NO_STRING, ""
    about = value[value.find("{") :] if "{" in value else ""
    return fingerprint(value), about if any(lease_of(about)) or decode(about) else ""


def since_sign(row: Row) -> float:
    """Return the seconds since a process gave a sign of life, from its key and the time that the key has left."""
    if row.left == ABSENT:
        return math.inf
    return max(0.0, lease_of(read_value(row.value)[1])[0] - (row.left or 0.0))


def in_turn(queues: Iterable[tuple[str, ...]]) -> tuple[Waiting, ...]:
    """Return the waiters of all nodes in one order: by best position, as one that is first anywhere may be next."""
    positions: defaultdict[str, list[int]] = defaultdict(list)
    for queue in queues:
        for position, name in enumerate(queue):
            positions[name].append(position)
    in_order = sorted(positions, key=lambda name: (min(positions[name]), sum(positions[name]), name))
    return tuple(_waiting(name, len(positions[name])) for name in in_order)


def _waiting(name: str, nodes: int) -> Waiting:
    """Parse a waiter's name, ``host:pid.random|number|label``; accept any text, because anybody can write to a node."""
    process, _, rest = name.partition("|")
    number, _, label = rest.partition("|")
    host, _, rest = process.rpartition(":")
    pid = rest.partition(".")[0]
    label = label.replace("\u00a0", " ")[:MAX_TEXT]
    return Waiting(
        host or process, int(pid) if pid.isdecimal() else 0, int(number) if number.isdecimal() else 0, nodes, label
    )
