"""
The managers of the aliases in ``REDLOCK``, one each per process, and the way to them.
"""

import os
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from django.core.signals import setting_changed

from . import signals
from .conf import DEFAULT_ALIAS, aliases, read_alias
from .engine.lock import Lock
from .engine.manager import LockManager


class RedlockHandler:
    """
    Give out the lock manager configured under each alias of ``REDLOCK``.

    One per alias and process, because it owns connections. Django's ``BaseConnectionHandler`` would make one per
    thread and per asyncio task. Settings are read at the first use of an alias.
    """

    def __init__(self) -> None:
        self._managers: dict[str, LockManager] = {}
        self._mutex = threading.Lock()

    def __getitem__(self, alias: str) -> LockManager:
        """
        Return the manager of an alias.

        Raises:
            InvalidRedlockError: The setting has no such alias or cannot be used.
        """
        try:
            return self._managers[alias]
        except KeyError:
            with self._mutex:
                if alias not in self._managers:
                    self._managers[alias] = self._create(alias)
                return self._managers[alias]

    def __iter__(self) -> Iterator[str]:
        return iter(aliases())

    def all(self) -> list[LockManager]:
        """Return the managers of all aliases."""
        return [self[alias] for alias in self]

    def reset(self) -> None:
        """Forget all managers and close their idle connections; the next use reads the settings anew."""
        with self._mutex:
            managers, self._managers = self._managers, {}
        for manager in managers.values():
            manager.retired = True
            manager.close()

    def _create(self, alias: str) -> LockManager:
        config = read_alias(alias)
        manager = LockManager(config.nodes, config.rules, alias=alias)
        manager.notify = partial(signals.send, manager)
        return manager


locks = RedlockHandler()
"""``locks["alias"]`` is the :class:`~django_redlock.engine.manager.LockManager` of an alias of ``REDLOCK``."""


def lock(
    name: str | Iterable[str],
    *,
    ttl: float | None = None,
    wait: float | None = None,
    using: str = DEFAULT_ALIAS,
    renew: bool | None = None,
    label: str = "",
    limit: int = 1,
    shared: bool = False,
    reentrant: bool = False,
    barge: bool = False,
    heartbeat: float | None = None,
    max_hold: float | None = None,
    cancel_on_lost: bool = False,
) -> Lock:
    """
    Describe a lock of an alias; asks no node until it is acquired.

    ``with lock("report:7"):`` and ``async with lock("report:7"):`` run their body under the lock, and
    ``@lock("report")`` runs a function or coroutine function under it.

    Args:
        name: What to lock, or several names to lock all or none of.
        ttl: Length of the lease in seconds; None is ``OPTIONS["ttl"]``, 30 by default.
        wait: How long to try in seconds; 0 is one attempt, None is for ever. Votes that were split between contenders,
            so that nobody has the lock, are repeated for one node timeout.
        using: Alias in ``REDLOCK``.
        renew: Whether to extend the lease while it is held; None is ``OPTIONS["renew"]``, True by default.
        label: What the holder is doing, for the people who look at held locks; never put a secret here.
        limit: How many may hold it at once, at most 1000; everybody must say the same number.
        shared: Whether other shared holders may have it too; an exclusive one, who says nothing, may not.
        reentrant: Whether the thread or task that has it may take it again, without asking any node.
        barge: Whether to take it, if it is free, before those that wait for it.
        heartbeat: After how many seconds without ``lease.heartbeat()`` it is no longer extended, for work that may hang
            while its process lives; None needs none.
        max_hold: Longest time that renewal keeps it, in seconds; None is ``OPTIONS["max_hold"]``, an hour by default.
        cancel_on_lost: Whether to cancel the body of ``async with`` when the lock is lost; the block then raises
            LockLostError.

    Raises:
        InvalidRedlockError: The settings cannot be used.
        TypeError: A name is not a string.
        ValueError: A number cannot work, or two arguments cannot be combined; the message says what to write.
    """

    def describe(names: str | Iterable[str]) -> Lock:
        return locks[using].lock(
            names,
            ttl=ttl,
            wait=wait,
            renew=renew,
            label=label,
            limit=limit,
            shared=shared,
            reentrant=reentrant,
            barge=barge,
            heartbeat=heartbeat,
            max_hold=max_hold,
            cancel_on_lost=cancel_on_lost,
        )

    described = describe(name)
    return described.made_by(partial(describe, described.names))


def _on_setting_changed(*, setting: str, **kwargs: Any) -> None:
    if setting in ("REDLOCK", "CACHES"):
        locks.reset()


if hasattr(os, "register_at_fork"):
    # Another thread of the parent may have held it.
    os.register_at_fork(after_in_child=lambda: setattr(locks, "_mutex", threading.Lock()))

setting_changed.connect(_on_setting_changed, dispatch_uid="django_redlock.reset")
