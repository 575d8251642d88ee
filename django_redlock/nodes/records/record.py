"""
Decide how requests change the records of a store (internal).

The node in memory (:mod:`~django_redlock.core.node_state`) decides a request, from the records as they were read.
Nothing here reads or writes; :mod:`.table` does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from time import time
from typing import Any, NamedTuple

from ...core.names import queue_of
from ...core.node_state import NodeState
from ...core.node_state.records import moment as moment_of
from ...core.protocol import SHARED, Acquire, Extend, Raise, Release, Repair, Reply, Request, Survey, without_secrets
from ...runtime.clock import Clock
from ..base import parse_json


class Moment(NamedTuple):
    """
    The present moment on the clock of a store, in seconds.

    Args:
        low: The clock shows at least this.
        high: The clock shows at most this.
        era: The era whose clock it is; empty for a store with a single clock.
        first: The beginning of the era, from which the holds of earlier eras count.
    """

    low: float
    high: float
    era: str = ""
    first: float = 0.0

    @property
    def margin(self) -> float:
        """Seconds by which every duration is lengthened, because it is counted from ``low``."""
        return self.high - self.low + 1e-6 if self.era else 0.0  # the node's time is cut to whole microseconds


@without_secrets
class Stored(NamedTuple):
    """A record as it was read, with the version that a write compares."""

    version: int
    record: dict[str, Any]


def parsed(text: str | bytes) -> dict[str, Any]:
    """
    Return the record in a text; it is empty if the text is not a record of ours.

    Other programs may change a record. Only its form is checked here: each number is checked where it is used.
    """
    try:
        record = parse_json(text)
        queue, sharers = record.get("queue", {}), record.get("sharers", {})
        pairs = [*(record[part] for part in ("holder", "fence") if part in record), *queue.values()]
        known = isinstance(sharers, dict) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
        return dict(record) if known else {}
    except (ValueError, AttributeError, RecursionError):
        return {}


@without_secrets
class Change(NamedTuple):
    """The new content of a record, to be written if its version is still *version*; None if there was no record."""

    key: str
    version: int | None
    record: dict[str, Any]


class Decision(NamedTuple):
    """
    The decision on some requests.

    Args:
        replies: The reply to each request, valid once the changes are written.
        changes: The records to write, all or none, in the order of their keys.
        notified: The waiters to notify, as ``process|number``.
        moment: The moment of the decision.
    """

    replies: list[Reply]
    changes: list[Change]
    notified: list[str]
    moment: Moment


@without_secrets
class Names(NamedTuple):
    """The slugs that requests concern, and the secrets that may have been released before they were granted."""

    slugs: set[str]
    secrets: set[str]


def names_of(requests: Iterable[Request]) -> Names:
    """Return the keys that must be read to decide on *requests*."""
    names = Names(set(), set())
    for request in requests:
        match request:
            case Extend(terms):
                for term in terms:
                    names.slugs.update(term.slugs)
                    names.slugs.update({queue_of(term.slugs[0])} if term.common else ())
                    names.secrets.add(term.secret)
            case Acquire() | Release():
                names.slugs.update(request.slugs)
                names.slugs.update({request.queue} - {""})
                names.secrets.add(request.secret)
                if isinstance(request, Acquire) and request.adopt:
                    names.secrets.add(request.adopt)
            case Raise() | Survey():
                names.slugs.update(request.slugs)
            case Repair():
                names.slugs.add(request.slug)
    return names


class Known:
    """
    The records of some names, read at one moment, and the node in memory that decides on them.

    Args:
        moment: The moment at which they were read.
        slugs: The names, by the keys of their records.
        tombstones: The secrets that may have tombstones, by the keys of their records.
        stored: The records that exist, by key.
        wall: Returns seconds since the epoch.
    """

    def __init__(
        self,
        moment: Moment,
        slugs: Mapping[str, str],
        tombstones: Mapping[str, str],
        stored: Mapping[str, Stored],
        wall: Clock,
    ) -> None:
        # A clock that counts from the election of a leader has no date, so the client's own bounds fencing tokens.
        self.store = NodeState(lambda: moment.low, wall=wall if moment.era else None)
        self.stored = stored
        self.moment = moment
        self.notified: list[str] = []
        self._slugs = slugs
        self._tombstones = tombstones
        for key, slug in slugs.items():
            if key in stored:
                self.store.records.load(slug, in_present_era(stored[key].record, moment))
        for key, secret in tombstones.items():
            if key in stored:
                self.store.records.load_tombstone(secret, in_present_era(stored[key].record, moment))

    def execute(self, request: Request) -> Reply:
        """Carry out a request, and note which waiters it notifies."""
        waiters = [waiter for queue in self.store.records.queues.values() for waiter in queue.stamps]
        self.store.listeners = {waiter.partition("|")[0]: self.notified.append for waiter in waiters}
        return self.store.execute(lengthened(request, self.moment.margin))

    def dump(self) -> dict[str, dict[str, Any]]:
        """Return the new content of the records, by their keys."""
        known, now = self.store.records, self.store.now()
        records = {key: {"slug": slug, **known.dump(slug, now)} for key, slug in self._slugs.items()}
        return records | {key: known.dump_tombstone(secret, now) for key, secret in self._tombstones.items()}

    def decide(self, requests: Sequence[Request]) -> Decision:
        """Carry out requests, none of which is a survey."""
        before, moment = self.dump(), self.moment
        replies = [self.execute(request) for request in requests]
        # A release with a tombstone changes the record, so that no request that was decided before is granted after it.
        releases = [one for one in requests if isinstance(one, Release) and one.tombstone]
        touched = {slug for release in releases for slug in release.slugs}
        era = {"era": moment.era, "written": moment.low} if moment.era else {}
        changes = [
            Change(where, self.stored[where].version if where in self.stored else None, record | era)
            for where, record in sorted(self.dump().items())
            if record != before[where] or self._slugs.get(where) in touched
        ]
        return Decision(replies, changes, self.notified, moment)


def load(
    names: Names,
    key: Callable[[str, str], str],
    read: Callable[[list[str]], tuple[Moment, Mapping[str, Stored]]],
    wall: Clock = time,
) -> Known:
    """
    Read the records of names.

    Args:
        names: The names and secrets.
        key: Returns the key of a record, by its kind and its name.
        read: Returns the moment, and the records that exist under some keys.
        wall: Returns seconds since the epoch.
    """
    slugs = {key("h", slug): slug for slug in names.slugs}
    tombstones = {key("x", secret): secret for secret in names.secrets}
    moment, stored = read([*slugs, *tombstones])
    known = Known(moment, slugs, tombstones, stored, wall)
    # A release that ends the holds of all sharers of a lock needs their secrets.
    sharers = {secret for slug in names.slugs for secret in known.store.sharers(slug)} - names.secrets
    if SHARED in names.secrets and sharers:
        return load(Names(names.slugs, names.secrets | sharers), key, read, wall)
    return known


def lengthened(request: Request, margin: float) -> Request:
    """Return a request whose durations are longer by *margin* seconds; see :attr:`Moment.margin`."""
    if not margin:
        return request
    match request:
        case Acquire():
            return request._replace(ttl=request.ttl + margin, keep=longer(request.keep, margin))
        case Extend():
            terms = tuple(term._replace(ttl=term.ttl + margin) for term in request.terms)
            return Extend(terms, longer(request.keep, margin))
        case Release():
            return request._replace(tombstone=request.tombstone and request.tombstone + margin)
        case Raise() | Repair():
            return request._replace(keep=longer(request.keep, margin))
    return request


def longer(seconds: float | None, margin: float) -> float | None:
    """Return a longer duration; None is for ever."""
    return None if seconds is None else seconds + margin


def in_present_era(record: dict[str, Any], moment: Moment) -> dict[str, Any]:
    """Return a record on the present leader's clock; the time that was left when it was written counts anew."""
    written = moment_of(record.get("written"))
    if record.get("era", "") == moment.era or written is None:
        return record
    later = moment.first - written
    moved = dict(record)
    for part in ("holder", "fence"):
        if part in record:
            moved[part] = [record[part][0], moved_by(record[part][1], later)]
    if "sharers" in record:
        moved["sharers"] = {secret: moved_by(until, later) for secret, until in record["sharers"].items()}
    if "queue" in record:
        moved["queue"] = {waiter: [stamp, moved_by(until, later)] for waiter, (stamp, until) in record["queue"].items()}
    if "until" in record:
        moved["until"] = moved_by(record["until"], later)
    moved["written"] = moment.first
    return moved


def moved_by(until: Any, later: float) -> Any:
    """Return a time of a record on another clock; any other value stays as it is."""
    ends = moment_of(until)
    return until if ends is None else ends + later


def needed_until(record: Mapping[str, Any]) -> float | None:
    """
    Return until when a record is needed, in seconds on its own clock; None means for ever.

    A record is needed at least until the moment at which it was written, so that it is not deleted at once: a write in
    flight may compare its version.
    """
    times = [moment_of(record[part][1]) for part in ("holder", "fence") if part in record]
    times += [moment_of(until) for _, until in record.get("queue", {}).values()]
    times += [moment_of(record["until"])] if "until" in record else []
    return max([moment_of(record.get("written")) or 0.0, *filter(None, times)]) if None not in times else None


def is_held(record: dict[str, Any], moment: Moment) -> bool:
    """Return whether a record has a holder whose hold may not have ended yet."""
    holder = in_present_era(record, moment).get("holder")
    until = holder and moment_of(holder[1])
    return holder is not None and (until is None or until > moment.low)


def digest(*parts: str) -> str:
    """Return a digest of names, for stores that limit the characters or the length of a key."""
    return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
