"""
Search nodes for fencing tokens that no node can have accepted (internal).

Listings find such tokens under held locks. A search also finds those of free locks, which listings do not contain.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from .base import Node

N = TypeVar("N", bound=Node)


class TokenSearch(NamedTuple):
    """
    The result of searching nodes.

    Args:
        slugs: The slugs of locks with an absurd fencing token.
        unsearched: The names of the nodes on which not every token was read.
    """

    slugs: frozenset[str]
    unsearched: tuple[str, ...]


def search_each(nodes: Sequence[N], search: Callable[[N], Iterable[str]]) -> TokenSearch:
    """Search all nodes at once; *search* yields slugs, and raises any exception if it cannot read all tokens."""
    found: set[str] = set()

    def finished(node: N) -> bool:
        try:
            for slug in search(node):
                found.add(slug)
        except Exception:  # each driver raises errors of its own, and the doctor reports what is wrong
            return False
        return True

    with ThreadPoolExecutor(len(nodes) or 1, thread_name_prefix="django_redlock inspect") as pool:
        done = list(pool.map(finished, nodes))
    return TokenSearch(frozenset(found), tuple(node.name for node, whole in zip(nodes, done, strict=True) if not whole))
