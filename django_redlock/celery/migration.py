"""
Base classes with the interfaces of celery-once and celery-singleton, over the slots of this package.

A project that comes from one of these packages changes only an import. Old options are mapped to those of
:class:`~django_redlock.celery.SingletonOptions`; unsafe ones cause a warning when the task is declared. New tasks use
:func:`~django_redlock.celery.singleton_task`.
"""

import inspect
import json
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import BoundArguments
from typing import Any, Self

from celery.contrib.django.task import DjangoTask
from celery.utils.imports import symbol_by_name

from ..core.rules import nearest
from ..keys.task import TaskKey
from ..singleton.options import CallKey, SingletonOptions
from ..singleton.slot import DuplicateTask
from .dispatch import SingletonResult
from .task import SingletonTask

ONCE = ("keys", "graceful", "timeout", "unlock_before_run")
PER_CALL = ("graceful", "timeout")
HOOKS = {
    "celery-once": ["get_key", "once_backend", "once_config", "default_timeout", "unlock_before_run"],
    "celery-singleton": [
        *("singleton_backend", "singleton_config", "generate_lock", "aquire_lock", "get_existing_task_id"),
        *("unlock", "lock_and_run", "on_duplicate"),
    ],
}
"""What subclasses of the old classes override; nothing here calls it."""


class AlreadyQueued(DuplicateTask):
    """
    celery-once's error about a duplicate.

    Args:
        countdown: Seconds until the slot frees itself unless its holder keeps it; None when unknown.
        holder_id: Id of the task that has the slot; None when it is not a task.
        state: The state of the slot, as in :class:`~django_redlock.celery.DuplicateTask`.
        name: The lock's name.
    """

    def __init__(
        self, countdown: float | None = None, holder_id: str | None = None, state: str = "held", name: str = ""
    ) -> None:
        super().__init__(holder_id, state, countdown, name)
        self.args = (countdown, holder_id, state, name)
        self.countdown = countdown

    @classmethod
    def found(cls, holder_id: str | None, state: str, retry_after: float | None, name: str) -> Self:
        """Return the error about a holder."""
        return cls(retry_after, holder_id, state, name)

    @property
    def message(self) -> str:
        """The message that celery-once would give."""
        return f"Expires in {self.countdown} seconds"


class DuplicateTaskError(DuplicateTask):
    """
    celery-singleton's error about a duplicate.

    Args:
        message: What happened.
        task_id: Id of the task that has the slot; None when it is not a task.
        state: The state of the slot, as in :class:`~django_redlock.celery.DuplicateTask`.
        retry_after: Seconds until the slot frees itself unless its holder keeps it; None when unknown.
        name: The lock's name.
    """

    def __init__(
        self,
        message: str = "",
        task_id: str | None = None,
        state: str = "held",
        retry_after: float | None = None,
        name: str = "",
    ) -> None:
        super().__init__(task_id, state, retry_after, name)
        self.args = (message, task_id, state, retry_after, name)
        self.task_id = task_id

    @classmethod
    def found(cls, holder_id: str | None, state: str, retry_after: float | None, name: str) -> Self:
        """Return the error about a holder."""
        return cls(f"Attempted to queue a duplicate of task ID {holder_id}", holder_id, state, retry_after, name)

    def __str__(self) -> str:
        return str(self.args[0])


class MigratedTask(SingletonTask[..., Any], DjangoTask):  # type: ignore[type-arg]
    """The common base of the two classes; it converts the old options when they are first needed."""

    abstract = True
    package = ""

    def __init_subclass__(cls, **options: Any) -> None:
        for name in HOOKS.get(cls.package, ()):
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__} has {name}, which {cls.package} called and nothing calls here. For a key of your "
                    "own, write @singleton_task(key=...); the slots are on the nodes of REDLOCK; the signal "
                    "singleton_duplicate tells of duplicates."
                )
        super().__init_subclass__(**options)
        if "run" not in vars(cls):
            return
        parameters = list(inspect.signature(cls.run).parameters.values())
        if not isinstance(vars(cls)["run"], staticmethod):
            parameters = parameters[1:]
        TaskKey(cls._migrated({}).key, inspect.Signature(parameters))
        cls._warn()

    def apply_async(self, *args: Any, **options: Any) -> SingletonResult[Any]:
        """
        Send a call that is not unique.

        A subclass gets here by ``super(QueueOnce, self).apply_async(...)``, which was Celery's own method in both
        packages.
        """
        return super().apply_async(*args, **options | {"singleton": False})

    @cached_property
    def singleton_options(self) -> SingletonOptions:  # type: ignore[override]
        """The equivalent of the old options."""
        return self._migrated(self.app.conf)

    @classmethod
    def _migrated(cls, conf: Mapping[str, Any]) -> SingletonOptions:
        """Return the equivalent of the old options of this task and of the app."""
        raise NotImplementedError

    @classmethod
    def _warn(cls) -> None:
        """Warn about old options that were unsafe or have another effect now."""


class QueueOnce(MigratedTask):
    """
    celery-once's ``QueueOnce``: ``@app.task(base=QueueOnce, once={"keys": ["shop_id"], "graceful": True})``.

    ``keys`` is ``key``; ``graceful`` is ``on_duplicate="join"``, without it ``AlreadyQueued`` is raised; ``timeout``
    is ``queue_ttl`` and does not limit the run, which keeps its slot for as long as it lives;
    ``unlock_before_run`` is ``scope="until_executing"``.
    """

    abstract = True
    package = "celery-once"
    once: Mapping[str, Any] = {}
    singleton_error = AlreadyQueued

    def apply_async(self, *args: Any, once: Mapping[str, Any] | None = None, **options: Any) -> SingletonResult[Any]:
        """Send the call as :class:`SingletonTask` does; *once* may have ``graceful`` and ``timeout``."""
        for name in once or ():
            if name not in PER_CALL:
                known = " and ".join(map(repr, PER_CALL))
                raise TypeError(f"once={{...}} of a call may have {known}, not {name!r}{nearest(name, PER_CALL)}")
        if once and options.get("singleton") is not False:
            chosen: dict[str, Any] = {}
            if "graceful" in once:
                chosen["on_duplicate"] = "join" if once["graceful"] else "raise"
            if "timeout" in once:
                chosen["queue_ttl"] = once["timeout"]
            options["singleton"] = chosen | (options.get("singleton") or {})
        return SingletonTask.apply_async(self, *args, **options)

    @classmethod
    def _migrated(cls, conf: Mapping[str, Any]) -> SingletonOptions:
        """
        Return the equivalent of ``once`` and the app's ``ONCE``.

        Raises:
            TypeError: There is none.
        """
        for name in cls.once:
            if name not in ONCE:
                raise TypeError(f"once has no option {name!r}{nearest(name, ONCE)}")
        settings = (conf.get("ONCE") or {}).get("settings", {})
        if settings.get("blocking"):
            raise TypeError(
                "ONCE['settings'] has blocking=True, but a call does not wait for its slot here. Remove blocking and "
                "blocking_timeout; a call whose slot is taken raises AlreadyQueued at once, or joins the other call "
                "with once={'graceful': True}."
            )
        keys = cls.once.get("keys")
        return SingletonOptions(
            key=None if keys is None else tuple(keys),  # with an empty list, all calls of the task have the same key
            on_duplicate="join" if cls.once.get("graceful") else "raise",
            queue_ttl=float(cls.once.get("timeout") or settings.get("default_timeout") or 3600),
            scope="until_executing" if cls.once.get("unlock_before_run") else "until_executed",
        )

    @classmethod
    def _warn(cls) -> None:
        """Warn about ``unlock_before_run``."""
        if cls.once.get("unlock_before_run"):
            warnings.warn(
                f"{cls.__name__}: unlock_before_run lets two runs of equal calls overlap, as in celery-once. If they "
                'must not, write @singleton_task(scope="until_and_while_executing").',
                stacklevel=4,
            )


class Singleton(MigratedTask):
    """
    celery-singleton's ``Singleton``: ``@app.task(base=Singleton, unique_on=["shop_id"], lock_expiry=60)``.

    ``unique_on`` is ``key``; ``raise_on_duplicate`` is ``on_duplicate="raise"`` with ``DuplicateTaskError``, else
    ``"join"``; ``lock_expiry`` is ``queue_ttl`` and does not limit the run.
    """

    abstract = True
    package = "celery-singleton"
    unique_on: Sequence[str] | str | None = None
    raise_on_duplicate: bool | None = None
    lock_expiry: float | None = None
    singleton_error = DuplicateTaskError

    def apply_async(self, *args: Any, **options: Any) -> SingletonResult[Any]:
        """Send the call as :class:`SingletonTask` does."""
        return SingletonTask.apply_async(self, *args, **options)

    @classmethod
    def _migrated(cls, conf: Mapping[str, Any]) -> SingletonOptions:
        """Return the equivalent of the attributes and the app's ``singleton_`` settings."""
        raises = conf.get("singleton_raise_on_duplicate") if cls.raise_on_duplicate is None else cls.raise_on_duplicate
        return SingletonOptions(
            key=_key(cls.unique_on, conf.get("singleton_json_encoder_class")),
            on_duplicate="raise" if raises else "join",
            queue_ttl=float(cls.lock_expiry or conf.get("singleton_lock_expiry") or 3600),
        )

    @classmethod
    def _warn(cls) -> None:
        """Warn about a ``lock_expiry`` that was meant to outlast the run."""
        if cls.lock_expiry is not None:
            warnings.warn(
                f"{cls.__name__}: lock_expiry is now for how long a message may wait. It let a second run begin when "
                "the first took longer; now a run keeps its slot to its end.",
                stacklevel=4,
            )

    def release_lock(self, task_args: Sequence[Any] | None = None, task_kwargs: Mapping[str, Any] | None = None) -> str:
        """Free the slot of a call, even of a running one; see :meth:`Singleton.release`."""
        return self.singleton.release(*(task_args or ()), force=True, **(task_kwargs or {}))


def _key(unique_on: Sequence[str] | str | None, encoder: type[json.JSONEncoder] | str | None) -> CallKey:
    """Return the key made from these parameters, None for all, by the encoder named in the app's settings."""
    names: tuple[str, ...] | None = None
    if unique_on is not None:  # with an empty list or name, all calls have the same key
        names = tuple(filter(None, (unique_on,) if isinstance(unique_on, str) else unique_on))
    if encoder is None:
        return names
    chosen = symbol_by_name(encoder) if isinstance(encoder, str) else encoder

    def encoded(call: BoundArguments) -> str:
        counted = call.arguments if names is None else {name: call.arguments[name] for name in names}
        return json.dumps(counted, sort_keys=True, cls=chosen)

    return encoded
