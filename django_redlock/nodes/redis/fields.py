"""
Read the fields of a script's reply: numbers, times and texts, one at a time or a whole column of a listing (internal).
"""

from typing import Any

from ...core.protocol import ABSENT, HIGHEST

LONGEST_NUMBER = 16  # digits of 2^53


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


def texts(column: list[Any]) -> list[str]:
    """Return a column of texts; raise TypeError if anything else is in it."""
    if {*map(type, column)} - {str}:
        raise TypeError("no text")
    return column
