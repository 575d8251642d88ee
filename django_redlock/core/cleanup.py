"""
The round that ends a hold or an attempt on the nodes (internal).

A release may overtake a request that is still on its way, because that request sits in a buffer or on another
connection. So the release to a node that has not replied also leaves a tombstone there, which refuses that request.
"""

from collections.abc import Collection, Iterable

from .protocol import Kind, Release
from .round import Round, count


def unanswered(rounds: Iterable[Round]) -> set[int]:
    """Return the nodes that may still execute a request of one of *rounds*."""
    return {node for round in rounds for node in round.unanswered()}


def cleanup(
    release: Release,
    nodes: Iterable[int],
    unsure: Collection[int],
    tombstone: float,
    timeout: float,
    needed: int | None = None,
) -> Round:
    """
    Return the round that sends *release* to *nodes*.

    The round is decided when *needed* nodes have released the lock, or when all have replied if *needed* is None.

    A node in *unsure* may execute an earlier request after the release. The release to it leaves a tombstone, which
    refuses such requests for *tombstone* seconds.
    """
    refusing = release._replace(tombstone=tombstone) if unsure else release
    return Round(
        requests={node: refusing if node in unsure else release for node in nodes},
        decided=lambda replies: needed is not None and count(replies, Kind.RELEASED) >= needed,
        timeout=timeout,
        needed=needed or 0,
        hoped=Kind.RELEASED if needed else None,
        cleanup=True,
        lasting=tombstone,
    )
