"""
Carry out requests on the records of a store (internal).

A request is repeated if another process changed one of its records between the read and the write. It is not repeated
if the outcome of the write is unknown: the first write may still arrive, and would then be carried out twice.
"""

import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import ClassVar

from ...core.admission import Greeting
from ...core.names import queue_of
from ...core.protocol import (
    ABSENT,
    ENDLESS,
    PART,
    POSITIVE,
    Extend,
    Failure,
    Kind,
    Reply,
    Request,
    Survey,
    failed,
    merge,
    split,
)
from ...runtime.clock import steady
from ..base import LinkError, known_cause
from .record import Decision, Moment, Names, Stored, is_held, load, names_of

ANSWERING = 0.8  # share of the node timeout after which the node gives up, so that its reason arrives in time
SEARCHING = 0.3  # share of the patience that a survey spends on records of locks that have ended
PAUSE = 0.005  # longest pause, in seconds, before a request is tried again because another process was faster


class UntouchedError(LinkError):
    """A store cannot be used, and certainly has not carried out the requests."""


class TooLargeError(Exception):
    """Requests need more than the store can write at once; nothing has been written."""


class AnswerError(Exception):
    """
    A store sent an error or a reply that cannot be used.

    Args:
        failure: The meaning of the reply.
    """

    code = 0
    certain: bool = False
    """Whether the request has certainly not been carried out."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


def link_error(error: Exception) -> LinkError:
    """Return what to report about a failure; never what the error quotes, which may hold a password."""
    match error:
        case LinkError():
            return error
        case AnswerError(failure=failure):
            return LinkError(failure)
        case TimeoutError():
            return LinkError(Failure.TIMEOUT)
    return known_cause(error) or LinkError(Failure.UNREACHABLE)


class RecordTable:
    """
    The records of one store, over one connection; used by one thread at a time.

    A kind of store overrides :meth:`open` and the methods after it.

    Args:
        patience: Seconds that a request may take.

    Attributes:
        part: The most names of one request that are decided and written together.
        most: The most names of several requests that are decided and written together.
        errors: The exceptions that the methods of a kind of store raise when a call fails.
    """

    part: ClassVar[int] = PART
    most: ClassVar[int] = sys.maxsize
    errors: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    def __init__(self, patience: float) -> None:
        self.patience = patience

    def execute(self, requests: Sequence[Request]) -> list[Reply]:
        """
        Carry out requests, which are all surveys or contain no survey.

        They are one atomic step, unless they have more names than the store can write at once.

        Raises:
            LinkError: They may or may not have been carried out.
            UntouchedError: They have not been carried out, and the connection cannot be used any more.
        """
        chunks = [chunked(request, self.part) for request in requests]
        asked = [chunk for some in chunks for chunk in some]  # each has few terms, or a single one
        replies: list[list[Reply]] = [[] for _ in asked]
        for batch in batches(asked, self.part, self.most):
            try:
                answers = self._together([part for _, part in batch])
            except UntouchedError as error:
                if any(replies):
                    raise LinkError(error.failure, error.detail) from None
                raise
            for (number, _), reply in zip(batch, answers, strict=True):
                replies[number].append(reply)
        merged = map(merge, replies)
        return [joined(list(islice(merged, len(some)))) for some in chunks]

    def _together(self, requests: Sequence[Request]) -> list[Reply]:
        """Carry out requests together, or one by one if they are too large together."""
        try:
            return self._repeat(requests)
        except TooLargeError:
            if len(requests) == 1:
                return [failed(Failure.BACKLOG)]
            return [reply for request in requests for reply in self._together([request])]

    def _repeat(self, requests: Sequence[Request]) -> list[Reply]:
        """Carry out requests that fit in one write; repeat them if another process was faster."""
        until = self.now() + self.patience * ANSWERING
        while True:
            try:
                self.ready()
            except LinkError as error:
                raise UntouchedError(error.failure, error.detail) from None
            writing = False
            try:
                decision = self._decide(requests)
                writing = bool(decision.changes)
                counts = self.write(decision) if writing else self.confirm(decision)
                if counts is not False:
                    return decision.replies if counts else [uncounted(reply) for reply in decision.replies]
                failure = Failure.CONTENDED
            except self.errors as error:
                failure = self.failed(error, unclear=writing)
            if failure.perhaps_lasting or self.now() >= until:  # the caller may try again
                return [failed(failure)] * len(requests)
            self.pause()

    def _decide(self, requests: Sequence[Request]) -> Decision:
        if surveys := [self.survey(request) for request in requests if isinstance(request, Survey)]:
            return Decision(surveys, [], [], Moment(0.0, 0.0))
        return load(names_of(requests), self.key, self.read, self.wall).decide(requests)

    def look_up(self, request: Survey) -> Reply:
        """Report the locks that a survey names."""
        slugs = {queue_of(slug) or slug for slug in request.slugs} | set(request.slugs)
        return load(Names(slugs, set()), self.key, self.read, self.wall).execute(request._replace(after="", size=0))

    def survey(self, request: Survey) -> Reply:
        """Report the named locks, or one page of the held ones, in the order of their keys."""
        if request.size <= 0:
            return self.look_up(request)
        moment, _ = self.read([])
        slugs, cursor, total = self._search(request, moment)
        reply = self.look_up(request._replace(slugs=tuple(slugs)))
        rows = tuple(row for row in reply.rows if row.left != ABSENT)
        return reply._replace(rows=rows, total=total, cursor=cursor)

    def _search(self, request: Survey, moment: Moment) -> tuple[list[str], str, int]:
        """
        Return the names that are held on one page, the cursor of the next page, and the number of records.

        Most records may belong to locks that have ended. Requests of this process wait for the search, so it ends
        early if there are very many such records. The page is then not full, but has a cursor.
        """
        slugs: list[str] = []
        cursor, total, until = request.after, 0, self.now() + self.patience * SEARCHING
        if cursor == ENDLESS:
            return slugs, "", total  # in these stores, every lock has an end
        while True:
            records, cursor, count = self.page(cursor, of_names=True)
            total = total or count
            for key, stored in sorted(records.items()):
                if is_held(stored.record, moment):
                    slugs.append(str(stored.record.get("slug", "")))
                if len(slugs) == request.size:
                    return slugs, key, total
            if not cursor or self.now() > until:
                return slugs, cursor, total

    # Time, which tests replace by virtual time

    def now(self) -> float:
        """Return seconds on this machine's steady clock."""
        return steady()

    def wall(self) -> float:
        """Return seconds since the epoch; they bound fencing tokens if the store has no wall clock."""
        return time.time()

    def pause(self, longest: float = PAUSE) -> None:
        """Wait a moment, for at most *longest* seconds, before a request is tried again."""
        time.sleep(random.random() * longest)

    # The parts that differ between kinds of stores

    def open(self) -> Greeting:
        """
        Connect.

        Raises:
            LinkError: The store cannot be used, or is another one than before.
        """
        raise NotImplementedError

    def describe(self) -> Greeting | None:
        """
        Describe the store again; None if each request compares everything that a greeting says.

        Raises:
            UntouchedError: The store cannot be used, or is another one than before.
        """
        return None

    def ready(self) -> None:
        """
        Connect if there is no connection.

        Raises:
            LinkError: The store cannot be used.
        """
        raise NotImplementedError

    def key(self, kind: str, name: str) -> str:
        """
        Return the key of a record.

        The kind is ``h`` for a name, ``x`` for a secret that was released, and ``w``, in stores that notify waiters,
        for the notifications to a process.
        """
        raise NotImplementedError

    def read(self, keys: Sequence[str]) -> tuple[Moment, Mapping[str, Stored]]:
        """Return the records that exist under some keys, and a moment at which the clock was read, not later."""
        raise NotImplementedError

    def write(self, decision: Decision) -> bool | None:
        """
        Write the changes of a decision, all or none, and notify the waiters.

        Returns:
            True if they were written, False if another process had changed a record since it was read. None if they
            were written under another leader than the one whose clock decided.
        """
        raise NotImplementedError

    def confirm(self, decision: Decision) -> bool:
        """Return whether the records read for a decision without changes were current; if not, it is made again."""
        return True

    def page(self, after: str, *, of_names: bool) -> tuple[dict[str, Stored], str, int]:
        """
        Return some records whose keys follow *after*, those of names or those of any kind, in the order of their keys.

        The text is the key after which the next page begins, empty if there is none; the number is the approximate
        number of records.
        """
        raise NotImplementedError

    def failed(self, error: Exception, *, unclear: bool) -> Failure:
        """
        Return the meaning of an error after which the request may be repeated.

        Args:
            error: One of :attr:`errors`.
            unclear: Whether a write was in progress.

        Raises:
            LinkError: The outcome of the write is unknown.
        """
        raise NotImplementedError

    def clean(self) -> None:
        """Occasionally delete records that have not been needed for a while; a failure does no harm."""

    def close(self) -> None:
        """Drop the connection; the next request makes a new one."""
        raise NotImplementedError

    def abort(self) -> None:
        """Make a call that waits for the store fail at once; any thread may call this."""
        raise NotImplementedError


def chunked(request: Request, part: int) -> list[Request]:
    """Split an extension into extensions of at most *part* names each; a single lease is not split."""
    if not isinstance(request, Extend) or weight(request) <= part:
        return [request]
    chunks = [Extend((), request.keep)]
    for term in request.terms:
        if chunks[-1].terms and weight(chunks[-1]) + weight(Extend((term,), None)) > part:
            chunks.append(Extend((), request.keep))
        chunks[-1] = Extend((*chunks[-1].terms, term), request.keep)
    return list(chunks)


def joined(replies: Sequence[Reply]) -> Reply:
    """Combine the replies to the chunks of a request into one."""
    if len(replies) == 1:
        return replies[0]
    if unclear := [reply for reply in replies if not reply.terms]:
        return unclear[0]._replace(kind=Kind.UNKNOWN)  # other leases may have been extended
    terms = tuple(term for reply in replies for term in reply.terms)
    held = sum(term.kind is Kind.HELD for term in terms)
    kind = Kind.HELD if held == len(terms) else Kind.MIXED if held else Kind.REFUSED
    return replies[0]._replace(kind=kind, fence=max(reply.fence for reply in replies), terms=terms)


def batches(requests: Sequence[Request], part: int, most: int) -> Iterator[list[tuple[int, Request]]]:
    """Yield the parts of requests, each with the number of its request, in groups that fit in one write."""
    batch: list[tuple[int, Request]] = []
    room = most
    for number, request in enumerate(requests):
        for piece in split(request, part):
            size = weight(piece)
            if batch and size > room:
                yield batch
                batch, room = [], most
            batch.append((number, piece))
            room -= size
    if batch:
        yield batch


def weight(request: Request) -> int:
    """Return how many records a request may write."""
    match request:
        case Survey():
            return 0
        case Extend(terms):
            return sum(len(term.slugs) + bool(term.common) for term in terms)
    return sum(map(len, names_of([request])))  # with the tombstones


def uncounted(reply: Reply) -> Reply:
    """Return a reply without its vote, because the leader changed during the write."""
    return failed(Failure.LEADER_CHANGED, Kind.UNKNOWN) if reply.kind in POSITIVE else reply
