"""
Encode requests to a Redis or Valkey master: the script, its keys and arguments, and their bytes (internal).

This runs for every lock, so a command is assembled as text and encoded once; redis-py, which handles more types of
arguments, takes ten times as long.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from ...core.protocol import ENROLMENT, FAR, Acquire, Extend, Raise, Release, Repair, Request, Survey, many, split

Words = tuple[int, int, str]


def word(text: str) -> str:
    """Return one word of a command as RESP, which puts the length in bytes in front."""
    return f"${len(text) if text.isascii() else len(text.encode())}\r\n{text}\r\n"


def words(*texts: str) -> str:
    """Return several words of a command as RESP."""
    joined = "".join([f"${len(text)}\r\n{text}\r\n" for text in texts])
    return joined if joined.isascii() else "".join(map(word, texts))


def key_start(slug: str) -> str:
    """Return the word of a key without its last letter, which stands for the kind of key."""
    return f"${2 + (len(slug) if slug.isascii() else len(slug.encode()))}\r\n{slug}:"


KINDS = {kinds: tuple(f"{kind}\r\n" for kind in kinds) for kinds in ("hfqs", "hfqsr", "hqs", "hqsr", "hf", "hfr")}
"""The ends of the words of keys, by the kinds of key that a script uses."""


class Script:
    """One of the Lua scripts beside this module."""

    def __init__(self, name: str) -> None:
        text = files(__package__).joinpath(f"scripts/{name}.lua").read_bytes()
        self.text = text.decode()
        self.sha = hashlib.sha1(text, usedforsecurity=False).hexdigest()
        self.by_digest, self.in_full = word("EVALSHA") + word(self.sha), word("EVAL") + word(self.text)


SCRIPTS = {request: Script(request.__name__.lower()) for request in (Acquire, Raise, Extend, Release, Survey, Repair)}
SERVED = Script("served")


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

    def channel(self, process: str) -> str:
        """Return the channel of a process, on which a node names the process's waiter that is first in the queue."""
        return f"{self.prefix}w:{process}"

    def subscription(self, process: str) -> bytes:
        """Return the bytes of the command that subscribes to the channel of a process."""
        return resp(["SUBSCRIBE", self.channel(process)])

    def pack(self, request: Request, packed: dict[int, bytes], in_full: bool) -> bytes:
        """Return the bytes of a request, made once for all nodes of a round, with or without the script's text."""
        if not self._shares:
            packed = {}
        key = -id(request) if in_full else id(request)
        data = packed.get(key)
        if data is None:
            if many(request):
                data = b"".join([self._command(part, in_full) for part in split(request)])
            else:
                data = self._command(request, in_full)
            packed[key] = data
        return data

    def _command(self, request: Request, in_full: bool) -> bytes:
        """Return the command that runs the request's script, by its digest or with its text."""
        script = SCRIPTS[type(request)]
        keys, count, text = self._say[type(request)](request)
        head = script.in_full if in_full else script.by_digest
        return f"{beginning(head, keys, count)}{text}".encode()

    # Each method returns the number of keys, the number of keys and arguments, and their words in the script's order.

    def _acquire(self, request: Acquire) -> Words:
        slugs, secret, value, ttl, number, keep, ahead, adopt, waiter, stamp, barge, shared, queue, strict = request
        count, keys = self._keys(slugs, "hfqsr" if shared else "hfqs", queue)
        own = words(secret, value, str(number), adopt, waiter, str(stamp))
        rest = rest_of_acquire(ttl, keep, ahead, barge, shared, shared or queue != "", strict)
        return 2 + count, 17 + count, f"{self._index}{self._tombstone(secret)}{keys}{own}{self._prefix}{rest}"

    def _raise(self, request: Raise) -> Words:
        slugs, secret, number, keep, shared = request
        count, keys = self._keys(slugs, "hfr" if shared else "hf")
        return count, count + 4, f"{keys}{word(secret)}{word(str(number))}{usual(ms(keep), shared)}"

    def _extend(self, request: Extend) -> Words:
        keys, arguments, touched = [self._index], [self._prefix, word(ms(request.keep))], 1
        for slugs, secret, value, ttl, fencing_token, shared, shorten, _ in request.terms:
            count, names = self._keys(slugs, "hfr" if shared else "hf")
            touched += 1 + count
            keys.append(self._tombstone(secret) + names)
            how = usual(str(len(slugs)), shared, shorten, ms(ttl))
            arguments.append(f"{how}{word(secret)}{word(str(fencing_token))}{word(value)}")
        return touched, touched + 2 + 7 * len(request.terms), "".join(keys + arguments)

    def _release(self, request: Release) -> Words:
        slugs, secret, tombstone, leaving, shared, queue, revoke, fencing_token = request
        count, keys = self._keys(slugs, "hqsr" if shared else "hqs", queue)
        own = words(secret, leaving, str(fencing_token))
        rest = rest_of_release(tombstone, shared, revoke)
        return 2 + count, 9 + count, f"{self._index}{self._tombstone(secret)}{keys}{own}{self._prefix}{rest}"

    def _survey(self, request: Survey) -> Words:
        slugs, after, size, waiters = request
        options = usual(str(size), "" if waiters is None else str(waiters))
        return 1, 5 + len(slugs), f"{self._index}{self._prefix}{word(after)}{options}{''.join(map(word, slugs))}"

    def _repair(self, request: Repair) -> Words:
        slug, number, keep = request
        count, keys = self._keys((slug,), "hf")
        return 1 + count, 5 + count, f"{self._index}{keys}{word(slug)}{word(str(number))}{usual(ms(keep), str(FAR))}"

    def _tombstone(self, secret: str) -> str:
        return word(f"{self.prefix}x:{secret}")

    def _keys(self, slugs: tuple[str, ...], kinds: str, queue: str = "") -> tuple[int, str]:
        """Return the number of keys of all names, and the keys, kind after kind; queue keys belong to *queue*."""
        if len(slugs) == 1 and not queue:
            start = key_start(self.prefix + slugs[0])
            return len(kinds), start + start.join(KINDS[kinds])
        starts = [key_start(self.prefix + slug) for slug in slugs]
        if queue:
            owner = key_start(self.prefix + queue)
            keys = [f"{owner if kind in 'qs' else start}{kind}\r\n" for kind in kinds for start in starts]
        else:
            keys = [f"{start}{kind}\r\n" for kind in kinds for start in starts]
        return len(keys), "".join(keys)


@lru_cache(maxsize=1024)
def ms(seconds: float | None) -> str:
    """Return *seconds* as whole milliseconds, or the empty string for None."""
    return "" if seconds is None else str(max(1, round(seconds * 1000)))


@lru_cache(maxsize=1024)
def micros(seconds: float) -> str:
    """Return *seconds* as whole microseconds."""
    return str(round(seconds * 1_000_000))


@lru_cache(maxsize=1024)
def usual(*arguments: str | bool) -> str:
    """Return the words of arguments that are the same for most requests, with truth values as the scripts read them."""
    return "".join([word(("1" if each else "") if isinstance(each, bool) else each) for each in arguments])


@lru_cache(maxsize=1024)
def rest_of_acquire(
    ttl: float, keep: float | None, ahead: float, barge: bool, shared: bool, passing: bool, strict: bool
) -> str:
    """Return the words that most requests to acquire have in common."""
    return usual(ms(ttl), ms(keep), micros(ahead), ms(ENROLMENT), barge, shared, passing, strict)


@lru_cache(maxsize=1024)
def rest_of_release(tombstone: float, shared: bool, revoke: bool) -> str:
    """Return the words that most releases have in common."""
    return usual(ms(tombstone) if tombstone else "0", shared, revoke)


@lru_cache(maxsize=64)
def beginning(head: str, keys: int, count: int) -> str:
    """Return a script command up to its first key; *count* is the number of keys and arguments."""
    return f"*{3 + count}\r\n{head}{word(str(keys))}"


def resp(command: Sequence[str]) -> bytes:
    """Return the bytes of a command."""
    return f"*{len(command)}\r\n{words(*command)}".encode()
