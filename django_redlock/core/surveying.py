"""The round that asks nodes which locks they have (internal)."""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypedDict

from .requests import Survey
from .round import Round
from .rules import Rules

NO_CURSORS: Mapping[int, str] = MappingProxyType({})


class SurveyOptions(TypedDict, total=False):
    """
    What to ask for.

    Attributes:
        slugs: The names, as they stand in the keys.
        after: The cursors that the nodes gave with the page before; without one a node gives its first page.
        count: How many names a page has; 0, the default, asks for the locks named.
        waiters: How many waiters of the locks named to name; 0 counts them, None, the default, does neither.
        but: The nodes that are not asked, by index.
        patience: How many seconds to wait at most; never longer than the node timeout, which is the default.
    """

    slugs: tuple[str, ...]
    after: Mapping[int, str]
    count: int
    waiters: int | None
    but: Iterable[int]
    patience: float


def survey_round(rules: Rules, options: SurveyOptions) -> Round:
    """Return the round, which waits for all nodes that are asked."""
    after = options.get("after", NO_CURSORS)
    slugs, count, waiters = options.get("slugs", ()), options.get("count", 0), options.get("waiters")
    asked = set(range(rules.nodes)).difference(options.get("but", ()))
    requests = {node: Survey(slugs, after.get(node, ""), count, waiters) for node in asked}
    timeout = min(rules.timeout(rules.ttl), options.get("patience", math.inf))
    return Round(requests, lambda replies: False, timeout, rules.needed)
