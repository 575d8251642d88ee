"""
Split a request over very many names into parts, and put their replies together (internal).

A script over a thousand names would block its node, and all other clients with it, for several milliseconds. So the
parts are sent one after another, and are no longer one atomic step on the node. At worst that costs an attempt: a node
counts as granted only if it granted every part, and whatever a refused attempt got is released.
"""

from collections.abc import Sequence

from .protocol import PART, Acquire, Extend, Kind, Raise, Release, Reply, Request

WORST_FIRST = (
    *(Kind.UNKNOWN, Kind.FAILED, Kind.CANCELLED, Kind.REFUSED, Kind.RELEASED),
    *(Kind.BUSY, Kind.QUEUED, Kind.GONE, Kind.GRANTED, Kind.ACCEPTED, Kind.HELD),
)


def many(request: Request, most: int = PART) -> bool:
    """Return whether a request has to be split for a node that takes *most* names in one step."""
    if isinstance(request, Extend):
        return len(request.terms) == 1 and len(request.terms[0].slugs) > most
    return isinstance(request, (Acquire, Raise, Release)) and len(request.slugs) > most


def split(request: Request, most: int = PART) -> list[Request]:
    """Return the parts of a request for a node that takes *most* names in one step; a small one is its only part."""
    if not many(request, most):
        return [request]
    if isinstance(request, Extend):
        term = request.terms[0]
        return [request._replace(terms=(term._replace(slugs=slugs),)) for slugs in pieces(term.slugs, most)]
    assert isinstance(request, (Acquire, Raise, Release))
    return [request._replace(slugs=slugs) for slugs in pieces(request.slugs, most)]


def pieces(slugs: tuple[str, ...], most: int) -> list[tuple[str, ...]]:
    """Return names in groups of at most *most*."""
    return [slugs[start : start + most] for start in range(0, len(slugs), most)]


def merge(replies: Sequence[Reply]) -> Reply:
    """Return one reply for the replies to the parts of a request; it means what the worst of them means."""
    if len(replies) == 1:
        return replies[0]
    worst = min(replies, key=lambda reply: WORST_FIRST.index(reply.kind))
    lefts = [reply.left for reply in replies]
    fence = max(reply.fence for reply in replies)
    return worst._replace(
        # One part may have been applied though another failed.
        kind=Kind.UNKNOWN if worst.kind is Kind.FAILED else worst.kind,
        fence=fence,
        left=None if None in lefts else max(left for left in lefts if left is not None),
        position=max(reply.position for reply in replies),
        terms=((worst.terms[0][0], fence),) if worst.terms else (),
    )
