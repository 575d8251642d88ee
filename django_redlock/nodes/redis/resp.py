"""
Read the replies of a node from the bytes that a socket or an event loop hands over (internal).

redis-py connects and authenticates. Its parsers, however, pull bytes out of a blocking socket or a stream, which costs
more than all the rest of a round: in an event loop, a task wakes up several times for every reply. Here, bytes are
pushed instead. This module reads the few types of reply that the scripts return: strings, numbers, errors and lists.
redis-py still decides what an error means.
"""

from collections.abc import Callable
from typing import Any, Final

PARTIAL: Final = object()
"""Stands for a reply that has not arrived completely."""

LONGEST_LINE = 65_536  # bytes; redis-py's streams end at the same length
LONGEST_REPLY = 8_388_608  # bytes; a page of locks has fewer, even if a survey cuts each of its values short
LONGEST_LIST = 1000  # parts; a sentinel's reply about a master has about 50
DEEPEST = 8  # lists in lists; the scripts reply with no more than one
KINDS = b"$-:+*"


class Replies:
    """
    The replies in a stream of bytes, however the stream was cut.

    Args:
        error: Makes an exception from the text of an error reply.
        longest: How many bytes a reply may have.
    """

    def __init__(self, error: Callable[[str], Exception], longest: int = LONGEST_REPLY) -> None:
        self._error = error
        self._longest = longest
        self._data = b""
        self._at = 0

    @property
    def empty(self) -> bool:
        """Whether all bytes have been read."""
        return self._at == len(self._data)

    def feed(self, data: bytes) -> None:
        """Add the next bytes of the stream."""
        self._data = self._data[self._at :] + data
        self._at = 0

    def next(self) -> Any:
        """
        Return the next reply, or ``PARTIAL``.

        A string is returned as bytes, a missing string or list as None, and an error as an exception.

        Raises:
            ValueError: The bytes are not a reply; nothing after them can be read either.
        """
        data = self._data
        if self._at == len(data):
            return PARTIAL
        reply, end = self._read(data, self._at, 0)
        if reply is not PARTIAL:
            self._at = end
        elif len(data) - self._at > self._longest:
            raise ValueError("a reply without end")
        return reply

    def _read(self, data: bytes, start: int, depth: int) -> tuple[Any, int]:
        """Return the reply at *start* and where it ends."""
        kind = data[start : start + 1]
        if kind not in KINDS:
            raise ValueError("no reply")
        end = data.find(b"\r\n", start)
        if end < 0:
            if len(data) - start > LONGEST_LINE:
                raise ValueError("a line without end")
            return PARTIAL, start
        line, end = data[start + 1 : end], end + 2
        if kind == b"$":
            return self._read_string(data, end, int(line) if line.isdigit() else length(line))
        if kind == b"-":
            return self._error(line.decode("utf-8", "replace")), end
        if kind == b":":
            return int(line), end
        if kind == b"+":
            return line, end
        if depth == DEEPEST:
            raise ValueError("lists without end")
        return self._read_list(data, end, length(line), depth + 1)

    def _read_string(self, data: bytes, start: int, size: int) -> tuple[Any, int]:
        """Return the string of *size* bytes at *start* and where the next reply begins; None for size -1."""
        if size < 0:
            return None, start
        end = start + size
        if len(data) < end + 2:
            if size > self._longest:
                raise ValueError("a string without end")  # before any of it is kept
            return PARTIAL, start
        if data[end : end + 2] != b"\r\n":
            raise ValueError("a string longer than its stated length")
        return data[start:end], end + 2

    def _read_list(self, data: bytes, at: int, size: int, depth: int) -> tuple[Any, int]:
        if size < 0:
            return None, at
        if size > LONGEST_LIST:
            raise ValueError("a list without end")
        parts = []
        for _ in range(size):
            part, at = self._read(data, at, depth)
            if part is PARTIAL:
                return PARTIAL, at
            parts.append(part)
        return parts, at


def length(line: bytes) -> int:
    """
    Return the length in a line, which is -1 for a missing string or list.

    Raises:
        ValueError: The line has no length.
    """
    if not line.isdigit() and line != b"-1":
        raise ValueError("no length")
    return int(line)
