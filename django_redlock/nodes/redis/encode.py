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

from ...core.parts import many, split
from ...core.requests import ENROLMENT, FAR, Acquire, Extend, Raise, Release, Repair, Request, Survey


class Script:
    """One of the Lua scripts beside this module."""

    def __init__(self, name: str) -> None:
        text = files(__package__).joinpath(f"scripts/{name}.lua").read_bytes()
        self.text = text.decode()
        self.sha = hashlib.sha1(text, usedforsecurity=False).hexdigest()


SCRIPTS = {request: Script(request.__name__.lower()) for request in (Acquire, Raise, Extend, Release, Survey, Repair)}
SERVED = Script("served")


class Introductions:
    """
    Which scripts a connection has sent with their text, so that its server knows them by their digest.

    A script is sent in full the first time rather than loaded: that takes no command, and no right, of its own.
    """

    def __init__(self) -> None:
        self._sent: set[type[Request]] = set()

    def is_new(self, request: Request) -> bool:
        """Return whether the script of *request* has not been sent yet, and note it as sent."""
        if type(request) in self._sent:
            return False
        self._sent.add(type(request))
        return True


class Encoder:
    """
    Encodes requests as the keys and arguments of the scripts.

    Args:
        prefix: What every key begins with.
        shares: Whether the other nodes of the alias have the same prefix, so that they can be sent the same bytes.
    """

    def __init__(self, prefix: str, *, shares: bool = True) -> None:
        self.prefix = prefix
        self._shares = shares
        self._index = f"{prefix}index"
        self.greeting = resp(["INFO"]) + resp(["EVAL", SERVED.text, "1", f"{prefix}served"])
        """The first commands of a connection: they ask who the server is, and since when it serves these locks."""
        self._say: dict[type[Request], Any] = {
            Acquire: self._acquire,
            Raise: self._raise,
            Extend: self._extend,
            Release: self._release,
            Survey: self._survey,
            Repair: self._repair,
        }

    def channel(self, process: str) -> str:
        """Return the channel of a process: a waiter of its that is first in the queue is published there."""
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
                data = b"".join([resp(self._command(part, in_full)) for part in split(request)])
            else:
                data = resp(self._command(request, in_full))
            packed[key] = data
        return data

    def _command(self, request: Request, in_full: bool) -> list[str]:
        """Return the command that runs the request's script, by its digest or with its text."""
        script = SCRIPTS[type(request)]
        keys, arguments = self._say[type(request)](request)
        return [
            "EVAL" if in_full else "EVALSHA",
            script.text if in_full else script.sha,
            str(len(keys)),
            *keys,
            *arguments,
        ]

    # The keys that a request touches and what else its script needs, both in the script's order

    def _acquire(self, request: Acquire) -> tuple[list[str], list[str]]:
        slugs, nonce, value, ttl, number, keep, ahead, adopt, waiter, stamp, barge, shared, queue, strict = request
        keys = [self._index, self._tombstone(nonce), *self._keys(slugs, "hfqs", shared, queue)]
        timing = [ms(ttl), str(number), ms(keep), micros(ahead)]
        waiting = [waiter, str(stamp), ms(ENROLMENT)]
        flags = [flag(barge), flag(shared), flag(request.passing), flag(strict)]
        return keys, [nonce, value, *timing, adopt, self.prefix, *waiting, *flags]

    def _raise(self, request: Raise) -> tuple[list[str], list[str]]:
        slugs, nonce, number, keep, shared = request
        return self._keys(slugs, "hf", shared), [nonce, str(number), ms(keep), flag(shared)]

    def _extend(self, request: Extend) -> tuple[list[str], list[str]]:
        keys, arguments = [self._index], [self.prefix, ms(request.keep)]
        for slugs, nonce, value, ttl, token, shared, shorten, _ in request.terms:
            keys += [self._tombstone(nonce), *self._keys(slugs, "hf", shared)]
            arguments += [str(len(slugs)), flag(shared), flag(shorten), nonce, ms(ttl), str(token), value]
        return keys, arguments

    def _release(self, request: Release) -> tuple[list[str], list[str]]:
        slugs, nonce, tombstone, leaving, shared, queue, revoke, token = request
        keys = [self._index, self._tombstone(nonce), *self._keys(slugs, "hqs", shared, queue)]
        return keys, [
            nonce,
            ms(tombstone) if tombstone else "0",
            self.prefix,
            leaving,
            flag(shared),
            flag(revoke),
            str(token),
        ]

    def _survey(self, request: Survey) -> tuple[list[str], list[str]]:
        slugs, after, size, waiters = request
        return [self._index], [self.prefix, after, str(size), "" if waiters is None else str(waiters), *slugs]

    def _repair(self, request: Repair) -> tuple[list[str], list[str]]:
        slug, number, keep = request
        return [self._index, *self._keys((slug,), "hf", False)], [slug, str(number), ms(keep), str(FAR)]

    def _tombstone(self, nonce: str) -> str:
        return f"{self.prefix}x:{nonce}"

    def _keys(self, slugs: tuple[str, ...], kinds: str, shared: bool, queue: str = "") -> list[str]:
        """Return the keys of all names, kind after kind; behind them, if shared, the key of each name's holders."""
        prefix = self.prefix
        if queue:
            owners = {"q": queue, "s": queue}
            keys = [f"{prefix}{owners.get(kind, slug)}:{kind}" for kind in kinds for slug in slugs]
        else:
            keys = [f"{prefix}{slug}:{kind}" for kind in kinds for slug in slugs]
        return keys + [f"{prefix}{slug}:r" for slug in slugs] if shared else keys


@lru_cache(maxsize=1024)
def ms(seconds: float | None) -> str:
    """Return *seconds* as whole milliseconds, the empty string for None."""
    return "" if seconds is None else str(max(1, round(seconds * 1000)))


@lru_cache(maxsize=1024)
def micros(seconds: float) -> str:
    """Return *seconds* as whole microseconds."""
    return str(round(seconds * 1_000_000))


def flag(value: bool) -> str:
    """Return a truth value as the scripts read it."""
    return "1" if value else ""


def resp(words: Sequence[str]) -> bytes:
    """Return the bytes of a command."""
    text = f"*{len(words)}\r\n" + "".join([f"${len(word)}\r\n{word}\r\n" for word in words])
    if text.isascii():  # each character is one byte
        return text.encode()
    parts = [word.encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])
