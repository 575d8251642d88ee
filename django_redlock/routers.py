"""
A database router that sends the reads of a block to the database in which the block has claimed its fence.

A claim proves that the reads after it are current, but only for reads in the claim's own transaction. A router that
sends reads to a replica undoes the proof: the replica may lag, and an old value that was read there is written back
behind the fence.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import router
from django.db.models import Model

# One set of aliases for each block around the running code. A block that ends empties its set: tasks that it started
# have a copy of the variable, but share the sets, so their reads follow the other routers again.
_blocks: ContextVar[tuple[set[str], ...]] = ContextVar("redlock_blocks", default=())


class FencedRouter:
    """
    Read from the database that is written, inside ``fenced()``, ``lock_for_update()`` and locked views.

    Put it first: ``DATABASE_ROUTERS = ["django_redlock.routers.FencedRouter", ...]``. In ``fenced()`` and
    ``lock_for_update()``, it decides about the models whose writes go to a database that the block has claimed. In a
    request that ``@locked_view`` locks, it decides about all models. Everywhere else it leaves the choice to the
    routers after it. It never chooses the database of a write.
    """

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        """Return the alias to which the routers send writes of *model* if a block around the caller pins it."""
        pinned = set[str]().union(*_blocks.get())
        if not pinned:
            return None
        alias: str = router.db_for_write(model, **hints)
        return alias if alias in pinned else None


@contextmanager
def reads_pinned(aliases: Iterable[str]) -> Iterator[None]:
    """Let :class:`FencedRouter` pin the databases *aliases* in the ``with`` block, in its threads and its tasks."""
    block = set(aliases)
    _blocks.set((*filter(None, _blocks.get()), block))
    try:
        yield
    finally:
        block.clear()  # an ``async with`` block may end in another context, which the variable there does not reach
        _blocks.set(tuple(filter(None, _blocks.get())))


def read_elsewhere(aliases: Collection[str]) -> tuple[type[Model], str, str] | None:
    """
    Return a model that is written to one of *aliases* but read from another database in a block that pins them.

    Return the two databases as well, or None if there is no such model. The routers are asked each time, because some
    choose at random, or depend on earlier queries; without routers, or with the pin, no router is asked.
    """
    if not router.routers or isinstance(router.routers[0], FencedRouter):
        return None
    with reads_pinned(aliases):
        for model in apps.get_models(include_auto_created=True):
            try:
                written, read = router.db_for_write(model), router.db_for_read(model)
            except Exception:  # a router may refuse to answer: no tenant is chosen, or a hint is missing
                continue
            if written in aliases and read != written:
                return model, written, read
    return None


def refuse_reads_elsewhere(block: str, aliases: Collection[str]) -> None:
    """
    Make sure that a block reads where it has claimed.

    Args:
        block: The function that opens the block, for the message.
        aliases: The databases of the claim.

    Raises:
        ImproperlyConfigured: The routers send reads to another database, and ``FencedRouter`` does not pin them.
    """
    if found := read_elsewhere(aliases):
        model, written, read = found
        raise ImproperlyConfigured(
            f"{block} claims on database {written!r}, but DATABASE_ROUTERS sends reads of {model._meta.label} to "
            f"{read!r}, which may lag behind: an old value could be read there and written back. Put "
            f"'django_redlock.routers.FencedRouter' first in DATABASE_ROUTERS; it sends the reads of such a block to "
            f"{written!r}. Or write {block[:-1]}..., route_reads=True), and read with .using({written!r}) what the "
            "block changes."
        )
