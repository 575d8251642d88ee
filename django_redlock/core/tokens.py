"""The highest fencing tokens that this process has seen (internal)."""

from collections import OrderedDict
from collections.abc import Iterable

from .protocol import HIGHEST


class HighestToken:
    """The highest token seen for each name; the next proposal goes above it. The oldest entries are dropped first."""

    def __init__(self, size: int = 10_000) -> None:
        self._size = size
        self._highest: OrderedDict[str, int] = OrderedDict()

    def of(self, slugs: Iterable[str]) -> int:
        """Return the highest number seen for any of *slugs*."""
        return max([self._highest.get(slug, 0) for slug in slugs], default=0)  # a generator would take twice as long

    def lift(self, slugs: Iterable[str], number: int) -> None:
        """Remember that *number* has been seen for *slugs*, unless no node could accept a higher one."""
        if number >= HIGHEST:
            return
        for name in slugs:
            if number > self._highest.get(name, 0):
                self._highest[name] = number
                self._highest.move_to_end(name)
        while len(self._highest) > self._size:
            self._highest.popitem(last=False)
