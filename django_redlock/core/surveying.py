"""The round that asks nodes which locks they have (internal)."""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypedDict

from .protocol import Survey
from .round import Round
from .rules import Rules

NO_CURSORS: Mapping[int, str] = MappingProxyType({})


class SurveyOptions(TypedDict, total=False):
    """
    The options of a survey.

    Attributes:
        slugs: The names, as written in the keys.
        after: The cursor that each node gave with the previous page; a node without a cursor gives its first page.
        count: How many names a page has; 0, the default, asks for the locks in *slugs*.
        waiters: The most waiters to list; 0 only counts them, and None, the default, does neither.
        but: The nodes that are not asked, by index.
        patience: The most seconds to wait; never longer than the node timeout, which is the default.
    """

    slugs: tuple[str, ...]
    after: Mapping[int, str]
    count: int
    waiters: int | None
    but: Iterable[int]
    patience: float


def survey_round(rules: Rules, options: SurveyOptions) -> Round:
    """Return the round of a survey, which waits for all nodes that it asks."""
    after = options.get("after", NO_CURSORS)
    slugs, count, waiters = options.get("slugs", ()), options.get("count", 0), options.get("waiters")
    asked = set(range(rules.nodes)).difference(options.get("but", ()))
    requests = {node: Survey(slugs, after.get(node, ""), count, waiters) for node in asked}
    timeout = min(rules.timeout(rules.ttl), options.get("patience", math.inf))
    return Round(requests, lambda replies: False, timeout, rules.needed)
