"""
What goes over the wire: requests as commands that run the scripts, and the replies to them (internal).

This runs for every lock. A command is assembled as text and encoded once for all nodes; redis-py, which handles more
types of arguments, takes ten times as long. Replies are read from the bytes that a socket or an event loop hands over:
redis-py's parsers pull bytes out of a blocking socket or a stream, which costs more than all the rest of a round. In an
event loop, a task would wake up several times for every reply. So redis-py connects, and decides what an error means;
here the few types of reply are read that the scripts return: strings, numbers, errors and lists.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib.resources import files
from typing import Any, Final

from redis import exceptions

from ...core.names import queue_of
from ...core.protocol import (
    ABSENT,
    ENROLMENT,
    FAR,
    HIGHEST,
    PART,
    Acquire,
    Extend,
    Extended,
    Failure,
    Kind,
    Raise,
    Release,
    Repair,
    Reply,
    Request,
    Row,
    Survey,
    failed,
    many,
    merge,
    split,
)
from ..base import INCOMPLETE, LinkError, Packed, parse_json
from .errors import link_error, parse_error

Words = tuple[int, int, str]


class Encoder:
    """
    Encode requests as the keys and arguments of the scripts.

    Args:
        prefix: The beginning of every key.
        shares: Whether the other nodes of the alias have the same prefix, so that they can be sent the same bytes.
    """

    def __init__(self, prefix: str, *, shares: bool = True) -> None:
        self.prefix = prefix
        self._shares = shares
        self._index, self._prefix = word(f"{prefix}index"), word(prefix)
        self._keys = lru_cache(maxsize=256)(partial(keys_of, prefix))
        self.greeting = resp(["INFO"]) + resp(["EVAL", SERVED.text, "1", f"{prefix}served"])
        """The first commands of a connection: which server is this, and since when has it served these locks?"""
        self._say: dict[type[Request], Any] = {
            Acquire: self._acquire,
            Raise: self._raise,
            Extend: self._extend,
            Release: self._release,
            Survey: self._survey,
            Repair: self._repair,
        }

    def subscription(self, process: str) -> bytes:
        """Return the command that subscribes to a process's channel, on which a node names its first waiter."""
        return resp(["SUBSCRIBE", f"{self.prefix}w:{process}"])

    def pack(self, request: Request, packed: Packed, in_full: bool, mark: bytes) -> bytes:
        """
        Return the bytes of a request, with or without the script's text.

        They are made once for all nodes of a round, but for the *mark*: the node's own, as one word of RESP.
        """
        if not self._shares:
            packed = {}
        key = -id(request) if in_full else id(request)
        pieces = packed.get(key)
        if pieces is None:
            pieces = packed[key] = self._pieces(request, in_full)
        return mark.join(pieces)

    def _pieces(self, request: Request, in_full: bool) -> list[bytes]:
        """
        Return the bytes between which the mark belongs.

        They are the command that runs the request's script, by its digest or with its text; or one for each part.
        """
        kind = type(request)
        keys, count, text = self._say[kind](request)
        if keys > PART and many(request):  # each name has a key, so most requests need no second look
            commands = [self._pieces(part, in_full)[0] for part in split(request)]
            return [*commands, b""] if kind in MARKED else [b"".join(commands)]
        command = f"{beginning(HEADS[kind][in_full], keys, count)}{text}".encode()
        return [command, b""] if kind in MARKED else [command]

    # Each method returns the number of keys, the number of keys and arguments, and their words in the script's order;
    # of the requests in ``MARKED``, the number counts the mark, too.

    def _acquire(self, request: Acquire) -> Words:
        slugs, secret, value, ttl, number, keep, ahead, adopt, waiter, stamp = request[:10]
        barge, shared, queue, strict, common, away = request[10:]
        count, keys = self._keys(slugs, "hfqsr" if shared else "hfqs", queue)
        own = words(secret, value, str(number), adopt, waiter, str(stamp))
        passing = shared or queue != "" or away > 0
        rest = rest_of_acquire(ttl, keep, ahead, away, barge, common or shared, passing, strict)
        if adopt:
            count, keys = count + 1, keys + self._tombstone(adopt)
        return 2 + count, 18 + count, f"{self._index}{self._tombstone(secret)}{keys}{own}{self._prefix}{rest}"

    def _raise(self, request: Raise) -> Words:
        slugs, secret, number, keep, shared = request
        count, keys = self._keys(slugs, "hfr" if shared else "hf")
        return count, count + 4, f"{keys}{words(secret, str(number))}{usual(ms(keep), shared)}"

    def _extend(self, request: Extend) -> Words:
        keys, arguments, touched = [self._index], [self._prefix, word(ms(request.keep))], 1
        for slugs, secret, value, ttl, fencing_token, shared, shorten, _, common, last in request.terms:
            count, names = self._keys(slugs, "hfr" if shared else "hf", queue_of(slugs[0]) if common else "")
            touched += 1 + count
            keys.append(self._tombstone(secret) + names)
            how = usual(str(len(slugs)), common or shared, f"{'last' if last else ''}{'1' if shorten else ''}", ms(ttl))
            arguments.append(f"{how}{words(secret, str(fencing_token), value)}")
        return touched, touched + 3 + 7 * len(request.terms), "".join(keys + arguments)

    def _release(self, request: Release) -> Words:
        slugs, secret, tombstone, leaving, shared, queue, revoke, fencing_token = request
        fences = "" if fencing_token == HIGHEST else "f"
        count, keys = self._keys(slugs, ("hqsr" if shared else "hqs") + fences, queue)
        own = words(secret, leaving, str(fencing_token))
        rest = usual(ms(tombstone) if tombstone else "0", "permit" if queue else shared, revoke)
        return 2 + count, 9 + count, f"{self._index}{self._tombstone(secret)}{keys}{own}{self._prefix}{rest}"

    def _survey(self, request: Survey) -> Words:
        slugs, after, size, waiters = request
        options = usual(str(size), "" if waiters is None else str(waiters))
        kinds = "hf" if waiters is None else "hfrqs"
        keys = [f"{self.prefix}{(kind in 'qs' and queue_of(slug)) or slug}:{kind}" for kind in kinds for slug in slugs]
        if size and not after:
            keys.append(f"{self.prefix}x:probe")
        count, text = 1 + len(keys), f"{self._index}{words(*keys)}{self._prefix}{word(after)}{options}{words(*slugs)}"
        return count, count + 4 + len(slugs), text

    def _repair(self, request: Repair) -> Words:
        slug, number, keep = request
        count, keys = self._keys((slug,), "hf")
        return 1 + count, 5 + count, f"{self._index}{keys}{words(slug, str(number))}{usual(ms(keep), str(FAR))}"

    def _tombstone(self, secret: str) -> str:
        return word(f"{self.prefix}x:{secret}")


class Script:
    """One of the Lua scripts beside this module."""

    def __init__(self, name: str) -> None:
        text = files(__package__).joinpath(f"scripts/{name}.lua").read_bytes()
        self.text = text.decode()
        self.sha = hashlib.sha1(text, usedforsecurity=False).hexdigest()


def word(text: str) -> str:
    """Return one word of a command as RESP, which puts the length in bytes in front."""
    return f"${len(text) if text.isascii() else len(text.encode())}\r\n{text}\r\n"


def words(*texts: str) -> str:
    """Return several words of a command as RESP."""
    joined = ""
    for text in texts:  # before Python 3.12, a comprehension costs each request a call
        joined += f"${len(text)}\r\n{text}\r\n"
    return joined if joined.isascii() else "".join(map(word, texts))


SCRIPTS = {request: Script(request.__name__.lower()) for request in (Acquire, Raise, Extend, Release, Survey, Repair)}
SERVED = Script("served")
MARKED = frozenset({Acquire, Extend})
"""The requests that take or extend a lock; a node carries them out only if its memory is the one that was greeted."""
KINDS_OF_KEYS = ("hfqs", "hfqsr", "hqs", "hqsr", "hqsf", "hqsrf", "hf", "hfr")
ENDS = {kinds: tuple(f"{kind}\r\n" for kind in kinds) for kinds in KINDS_OF_KEYS}
"""The ends of the words of keys, by the kinds of key that a script uses."""
HEADS = {kind: (words("EVALSHA", each.sha), words("EVAL", each.text)) for kind, each in SCRIPTS.items()}


def keys_of(prefix: str, slugs: tuple[str, ...], kinds: str, queue: str = "") -> tuple[int, str]:
    """
    Return the number of keys of all names, and the keys, kind after kind.

    Of a permit, *queue* is the slug of its lock: the queue keys are those of the lock, whose holders come last.
    """
    if len(slugs) == 1 and not queue:  # as nearly always; the keys differ in the last letter alone
        start = f"{prefix}{slugs[0]}:"
        start = f"${1 + (len(start) if start.isascii() else len(start.encode()))}\r\n{start}"
        return len(kinds), start + start.join(ENDS[kinds])
    keys = [f"{prefix}{(kind in 'qs' and queue) or slug}:{kind}" for kind in kinds for slug in slugs]
    keys += [f"{prefix}{queue}:h", f"{prefix}{queue}:r"] if queue else []
    return len(keys), words(*keys)


def resp(command: Sequence[str]) -> bytes:
    """Return the bytes of a command."""
    return f"*{len(command)}\r\n{words(*command)}".encode()


@lru_cache(maxsize=64)
def beginning(head: str, keys: int, count: int) -> str:
    """Return a script command up to its first key; *count* is the number of keys and arguments."""
    return f"*{3 + count}\r\n{head}{word(str(keys))}"


@lru_cache(maxsize=1024)
def usual(*arguments: str | bool) -> str:
    """Return the words of arguments that are the same for most requests, with truth values as the scripts read them."""
    return words(*[("1" if each else "") if isinstance(each, bool) else each for each in arguments])


@lru_cache(maxsize=1024)
def rest_of_acquire(
    ttl: float,
    keep: float | None,
    ahead: float,
    away: float,
    barge: bool,
    shared: bool | str,
    passing: bool,
    strict: bool,
) -> str:
    """Return the words that most requests to acquire have in common."""
    micros = str(round(ahead * 1_000_000))
    return usual(ms(ttl), ms(keep), micros, ms(away or ENROLMENT), barge, shared, passing, strict)


@lru_cache(maxsize=1024)
def ms(seconds: float | None) -> str:
    """Return *seconds* as whole milliseconds, or the empty string for None."""
    return "" if seconds is None else str(max(1, round(seconds * 1000)))


PARTIAL: Final = object()
"""Stands for a reply that has not arrived completely."""

OPENED: Final = object()
"""Stands for a list whose parts come next."""

LONGEST_LINE = 65_536  # bytes; redis-py's streams end at the same length
LONGEST_REPLY = 2_097_152  # bytes; the script of a survey cuts the values of other programs shorter if they need more
LONGEST_LIST = 1000  # parts; a sentinel's reply about a master has about 50
MOST_PARTS = 1000  # parts of one reply, with those of its inner lists; that to HELLO names the modules of a server
MOST_PARTS_OF_GUIDE = 32_768  # parts of a reply about a master; 1000 ranges of a cluster's slots have fewer
DEEPEST = 8  # lists in lists; the scripts reply with no more than one


class Replies:
    """
    The replies in a stream of bytes, however the stream was cut.

    Each byte is read once: a reply that has arrived in part is kept as its finished parts, so that a node cannot cost
    more time than it sends bytes.

    Args:
        error: Makes an exception from the text of an error reply.
        longest: How many bytes a reply may have.
        most: How many parts a reply may have.

    Attributes:
        empty: Whether all bytes have been read, and no reply has begun.
    """

    def __init__(self, error: Callable[[str], Exception], longest: int = LONGEST_REPLY, most: int = MOST_PARTS) -> None:
        self.empty = True
        self._error = error
        self._longest = longest
        self._most = most
        self._data = b""
        self._at = 0  # where the unread bytes of the data begin
        # The bytes after the data, while a string lacks more than those. Pieces of a few bytes would take many times
        # their size if each were kept.
        self._later = bytearray()
        self._lacking = 0
        self._lists: list[tuple[list[Any], int]] = []  # the lists that are open, each with its length
        self._parts = 0
        self._size = 0  # bytes that have arrived since the reply began

    def feed(self, data: bytes) -> None:
        """Add the next bytes of the stream."""
        self.empty = False
        self._size += len(data)
        self._lacking -= len(data)
        self._later += data
        if self._lacking <= 0:
            self._data = b"".join((self._data[self._at :], self._later))
            self._at = 0
            self._later = bytearray()

    def next(self) -> Any:
        """
        Return the next reply, or ``PARTIAL``.

        A string is returned as bytes, a missing string or list as None, and an error as an exception.

        Raises:
            ValueError: The bytes are not a reply; nothing after them can be read either.
        """
        lists = self._lists
        while (part := self._next_part()) is not PARTIAL:
            if part is OPENED:
                continue
            while lists:
                parts, length = lists[-1]
                parts.append(part)
                if len(parts) < length:
                    break
                part = lists.pop()[0]
            else:
                self._parts, self._size = 0, len(self._data) - self._at
                self.empty = not self._size
                return part
        if self._size > self._longest:
            raise ValueError("a reply without end")
        return PARTIAL

    def _next_part(self) -> Any:
        """Return a string, a number, an error, an empty or missing list, ``OPENED`` or ``PARTIAL``."""
        data, start = self._data, self._at
        if self._lacking > 0 or start == len(data):
            return PARTIAL
        kind, end = data[start : start + 1], data.find(b"\r\n", start)
        if kind not in b"$-:+*":
            raise ValueError("no reply")
        if end < 0:
            if len(data) - start > LONGEST_LINE:
                raise ValueError("a line without end")
            return PARTIAL
        line, end = data[start + 1 : end], end + 2
        part: Any
        if kind == b"$":
            size = length_in(line)
            if size > self._longest:
                raise ValueError("a string without end")  # before any of it is kept
            part = None
            if size >= 0:
                stop = end + size
                self._lacking = stop + 2 - len(data)
                if self._lacking > 0:
                    return PARTIAL
                if data[stop : stop + 2] != b"\r\n":
                    raise ValueError("a string longer than its stated length")
                part, end = data[end:stop], stop + 2
        elif kind == b"*":
            part = self._open_list(length_in(line))
        elif kind == b":":
            part = int(line)
        else:
            part = line if kind == b"+" else self._error(line.decode("utf-8", "replace"))
        self._at = end
        return part

    def _open_list(self, size: int) -> Any:
        if len(self._lists) == DEEPEST:
            raise ValueError("lists without end")
        self._parts += size
        if size > LONGEST_LIST or self._parts > self._most:
            raise ValueError("a list without end")
        if size > 0:
            self._lists.append(([], size))
            return OPENED
        return [] if size == 0 else None


def length_in(line: bytes) -> int:
    """
    Return the length in a line, which is -1 for a missing string or list.

    Raises:
        ValueError: The line has no length.
    """
    if not line.isdigit() and line != b"-1":
        raise ValueError("no length")
    return int(line)


# The node grants a free lock and accepts its token, or it releases a lock. The numbers have 16 digits until the year
# 2286, so each form has a fixed length.
COMMON = re.compile(rb"\$48\r\nACCEPTED (\d{16}) (\d{16}) 0 -1 \r\n|\$33\r\nRELEASED 0 (\d{16}) 0 -1 \r\n")


def common_reply(request: Request, found: re.Match[bytes]) -> Reply | None:
    """Return the reply that ``COMMON`` matched, or None if it cannot be the whole reply to *request*."""
    if found.lastindex == 2 and isinstance(request, Acquire):
        number, now = int(found[1]), int(found[2])
        reply = Reply(Kind.ACCEPTED, number, now) if number == request.number else None
    elif found.lastindex == 3 and isinstance(request, Release):
        now = int(found[3])
        reply = Reply(Kind.RELEASED, 0, now)
    else:
        return None
    return reply if now <= HIGHEST and len(request.slugs) <= PART else None


class Assembly:
    """Interpret the replies of a node as they arrive, and combine those to the parts of a request."""

    def __init__(self) -> None:
        self._replies: list[Reply | None] = []

    def add(self, request: Request, raw: Any, unserved: Mapping[Failure, Failure]) -> Reply | None:
        """
        Return the reply to the whole request, ``INCOMPLETE``, or None if the node does not know the script.

        Args:
            request: The oldest request without a reply.
            raw: The next reply of the node.
            unserved: The errors of a server that no longer serves these locks, and what to report for each.

        Raises:
            LinkError: The reply is such an error, or one after which redis-py closes the connection. A new connection
                finds out which server serves the locks now.
        """
        reply: Reply | None = None
        if not isinstance(unchanged(raw), exceptions.RedisError):
            reply = checked(request, parse_reply(raw))
        elif not isinstance(raw, exceptions.NoScriptError):
            reply = parse_error(raw)
            if reply.failure and reply.failure in unserved:
                raise LinkError(unserved[reply.failure])
        if not many(request):
            return reply
        self._replies.append(reply)
        if len(self._replies) < len(split(request)):
            return INCOMPLETE
        replies, self._replies = self._replies, []
        known = [one for one in replies if one is not None]
        return merge(known) if len(known) == len(replies) else None


def unchanged(raw: Any) -> Any:
    """
    Return a reply as it is; an error reply is returned as an exception, not raised.

    Raises:
        LinkError: The reply is an error after which the server hangs up, or does nothing else for now.
    """
    if isinstance(raw, exceptions.RedisError) and not isinstance(raw, exceptions.ResponseError):
        raise link_error(raw)
    return raw


# The errors of reading a malformed reply; JSON may be nested too deeply, or contain an infinite number.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)

# The kinds that a node itself can reply; the client assigns the others.
REPLIED = frozenset(Kind) - {Kind.NO_VOTE, Kind.EXCLUDED, Kind.FAILED, Kind.UNKNOWN}

KINDS = {kind.name: kind for kind in REPLIED}

EXTENSIONS = frozenset({Kind.HELD, Kind.MIXED, Kind.REFUSED})

EXPECTED: dict[type[Request], frozenset[Kind]] = {
    Acquire: frozenset({Kind.ACCEPTED, Kind.GRANTED, Kind.BUSY, Kind.QUEUED, Kind.CANCELLED}),
    Raise: frozenset({Kind.ACCEPTED, Kind.GRANTED, Kind.REFUSED}),
    Extend: EXTENSIONS,
    Release: frozenset({Kind.RELEASED, Kind.BUSY, Kind.GONE}),
    Survey: frozenset({Kind.LISTED}),
    Repair: frozenset({Kind.RELEASED, Kind.GONE}),
}

LONGEST_NUMBER = 16  # digits of 2^53
LONGEST_KEYS = 5000  # characters of the keys of one lock


def parse_reply(raw: Any) -> Reply:
    """Return the meaning of a script's reply; a malformed reply is no vote."""
    try:
        if isinstance(raw, list):
            return parse_survey([part.decode("utf-8", "replace") for part in raw])
        word, fence, time, left, position, detail = raw.decode("utf-8", "replace").split(" ", 5)
        kind = KINDS[word]
        # This repeats fencing_token() and whole(); calling them for every lock would cost as much as the rest.
        if len(fence) == len(time) == LONGEST_NUMBER and (both := fence + time).isdigit() and both.isascii():
            number, now = int(fence), int(time)
        else:
            number, now = fencing_token(fence), whole(time)
        if now > HIGHEST:
            raise ValueError("no number")
        if kind in EXTENSIONS:
            # Each: a letter, the token, and after a refusal the holder, whose spaces are written as this separator.
            results = [result.split(HOLDER, 1) for result in detail.split(" ") if result]
            tokens = fencing_tokens([result[0][1:] for result in results])
            kinds = [TERMS[result[0][0]] for result in results]
            holders = ["".join(result[1:]).replace(HOLDER, " ") for result in results]
            terms = tuple(map(Extended, kinds, tokens, holders))
            return Reply(kind, number, now, terms=terms)
        return Reply(kind, number, now, seconds_left(left), detail, -1 if position == "-1" else whole(position))
    except MALFORMED:
        return failed(Failure.MALFORMED, Kind.UNKNOWN)


def checked(request: Request, reply: Reply) -> Reply:
    """Return *reply* if it fits *request*: an accepted token must be the proposed one."""
    kind = reply.kind
    if kind is Kind.ACCEPTED:
        sound = isinstance(request, (Acquire, Raise)) and reply.fence == request.number
    else:
        sound = kind in EXPECTED[type(request)] or kind in (Kind.FAILED, Kind.UNKNOWN)
    return reply if sound else failed(Failure.MALFORMED, Kind.UNKNOWN)


HOLDER = "\x1f"

TERMS = {"H": Kind.HELD, "R": Kind.REFUSED, "S": Kind.REVOKED}


def parse_survey(parts: list[str]) -> Reply:
    """Return the locks that a survey reports."""
    kind, fence, time, total, rows, queued, refused, cursor = parts
    cells, queues = parse_json(rows), parse_json(queued)
    if len(cells) % 4:
        raise ValueError("a row that is cut")
    # A listing has thousands of rows, so their fields are checked column by column.
    slugs, values = texts(cells[::4]), texts(cells[1::4])
    parsed = tuple(map(Row, slugs, values, all_seconds_left(cells[2::4]), fencing_tokens(cells[3::4])))
    if queues:
        parsed = tuple(
            [
                Row(
                    row.slug,
                    row.value,
                    row.left,
                    row.fence,
                    tuple(names.split(" ")) if names else (),
                    whole(str(count)),
                    whole(str(sharers)),
                    whole(str(since)),
                    odd_keys(odd) if odd else (),
                )
                for row, count, names, sharers, since, odd in zip(
                    parsed, queues[::5], queues[1::5], queues[2::5], queues[3::5], queues[4::5], strict=True
                )
            ]
        )
    detail = parse_error(exceptions.ResponseError(refused)).detail if refused else ""
    number = fencing_token(fence)
    return Reply(KINDS[kind], number, whole(time), detail=detail, rows=parsed, total=whole(total), cursor=cursor)


def fencing_token(text: str) -> int:
    """Return a fencing token; a text that is no number, or too high for the scripts, becomes ``HIGHEST + 1``."""
    if len(text) > LONGEST_NUMBER or not (text.isdigit() and text.isascii()):
        return HIGHEST + 1
    return min(int(text), HIGHEST + 1)


def fencing_tokens(column: list[str]) -> list[int]:
    """Return the fencing token in each text of a column."""
    digits = "".join(column)
    if {*map(len, column)} == {LONGEST_NUMBER} and digits.isdigit() and digits.isascii():  # the usual case
        tokens = list(map(int, column))
        if max(tokens) <= HIGHEST:
            return tokens
    return list(map(fencing_token, column))


def seconds_left(pttl: str | float) -> float | None:
    """Return a PTTL in seconds: None for a key without expiry, ``ABSENT`` for no key."""
    value = min(int(pttl), HIGHEST)
    if value < -2:
        raise ValueError("no time left")
    return None if value == -1 else ABSENT if value == -2 else value / 1000


def all_seconds_left(column: list[Any]) -> list[float | None]:
    """Return each PTTL of a column in seconds, as :func:`seconds_left` does."""
    if {*map(type, column)} == {int} and min(column) >= 0 and max(column) <= HIGHEST:  # the usual case
        return [pttl / 1000 for pttl in column]
    return list(map(seconds_left, column))


def whole(text: str) -> int:
    """
    Return *text* as a number from 0 to 2^53 - 1.

    Raises:
        ValueError: *text* is no such number.
    """
    if not (text.isascii() and text.isdigit()) or len(text) > LONGEST_NUMBER or int(text) > HIGHEST:
        raise ValueError("no number")
    return int(text)


def odd_keys(keys: Any) -> tuple[str, ...]:
    """Return the keys of one lock that are of another type."""
    if not isinstance(keys, list) or len(keys) > len("hfqsr") or len("".join(keys)) > LONGEST_KEYS:
        raise ValueError("no keys of a lock")
    return tuple(keys)


def texts(column: list[Any]) -> list[str]:
    """Return a column of texts; raise TypeError if anything else is in it."""
    if {*map(type, column)} - {str}:
        raise TypeError("no text")
    return column
