"""
Run a management command under a lock: cron starts it on every server, and one of them does the work (internal).
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from threading import get_ident
from types import MethodType
from typing import Any, Protocol, TypeVar, overload
from weakref import WeakKeyDictionary

from django.core.exceptions import ImproperlyConfigured
from django.core.management import BaseCommand, CommandError
from django.http import HttpRequest

from ..conf import InvalidRedlockError
from ..core.protocol import LOST as HAD_ENDED
from ..core.protocol import EndReason
from ..core.rules import DEFAULT_ALIAS, check_switch, check_wait, from_zero, optional_seconds
from ..engine.functions import makes_coroutine, makes_generator, work_left
from ..engine.lease import Lease
from ..engine.lock import Lock
from ..engine.manager import owner_here
from ..engine.options import explained
from ..exceptions import EXPLANATIONS, LockTakenError, QuorumUnavailableError
from ..handler import locks
from ..keys.view import Key, P, ViewCall, ViewKey

Command = TypeVar("Command", bound=BaseCommand)
Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Handle = TypeVar("Handle", bound=Callable[..., str | None])  # a key returns a str, so it is not taken for a handle()


class OfOptions(Protocol):
    """A function that takes the options of a command."""

    def __call__(self, **options: Any) -> str:
        """Return a key, or a part of one."""


CommandKeys = str | OfOptions | Callable[P, str] | Sequence[str | OfOptions] | Sequence[str | Callable[..., str]]

# The exit codes of sysexits.h that describe what happened; cron, systemd and mail servers understand them.
SKIPPED = 75  # EX_TEMPFAIL: somebody else does the work
NO_QUORUM = 69  # EX_UNAVAILABLE: too few nodes answered
LOST = 76  # EX_PROTOCOL: the run began, but did not keep its lock to the end

ABOVE = "Write it above all other decorators of handle()."
INSTEAD_OF_COROUTINE = (
    "Write a plain handle() that calls asyncio.run(), or 'async with lock(...):' inside the coroutine, undecorated."
)
LEASES = "_redlock_leases"
"""The attribute of a command with the thread in which it works, and its leases there, the innermost last."""

Lockable = Callable[[Any], Any]
"""Returns a ``handle()`` under a lock."""

_locks: "WeakKeyDictionary[type, Lockable]" = WeakKeyDictionary()
"""The lock of each class that is decorated, or whose ``handle()`` is."""

_handles: "WeakKeyDictionary[Any, tuple[Lockable, Any]]" = WeakKeyDictionary()
"""Each ``handle()`` under a lock, with that lock, and with what is locked if the lock is that of a base."""

log = logging.getLogger("django_redlock")


@overload
def locked_command(key: type[Command]) -> type[Command]: ...


@overload
def locked_command(
    key: CommandKeys[P] | None = None,
    *,
    ttl: float | None = None,
    wait: float | None = 0,
    max_hold: float | None = None,
    hold_for: float = 0.0,
    hold_on_error: bool = True,
    skip_exit_code: int = SKIPPED,
    using: str = DEFAULT_ALIAS,
) -> Callable[[Decorated], Decorated]: ...


@overload
def locked_command(key: Handle) -> Handle: ...


@explained
def locked_command(
    key: Any = None,
    *,
    ttl: float | None = None,
    wait: float | None = 0,
    max_hold: float | None = None,
    hold_for: float = 0.0,
    hold_on_error: bool = True,
    skip_exit_code: int = SKIPPED,
    using: str = DEFAULT_ALIAS,
) -> Any:
    """
    Let one run of a management command work at a time, however many servers start it.

    Decorate the class or its ``handle()``; ``@locked_command`` without arguments locks the command's name. A subclass
    has the same lock, even if it overrides ``handle()`` or has that of a mixin. Write it above all other decorators of
    ``handle()``. There, ``self.lease`` is the lease: call ``self.lease.ensure()`` between two long pieces of work.

    Args:
        key: What to lock, as the name ``command:<key>``: a template with the command's options, such as
            ``"import:{supplier}"``, or a callable that takes the options and returns a str, or a list of these. None
            means the command's name.
        ttl: Length of the lease in seconds; None means ``OPTIONS["ttl"]``. The lease is renewed as the settings say.
        wait: How long to try, in seconds; 0 means one attempt, None means for ever.
        max_hold: Longest time that renewal keeps the lock, in seconds; None means ``OPTIONS["max_hold"]``, an hour by
            default.
        hold_for: The least time for which the lock stays taken, in seconds from its acquisition, also if the run ends
            earlier, however it ends.
        hold_on_error: Whether a run that ends with an exception leaves the lock taken, too.
        skip_exit_code: The exit code of a run that finds the lock taken; with 0 it also prints nothing.
        using: Alias in ``REDLOCK``.

    Raises:
        ImproperlyConfigured: The key can never be resolved.
        TypeError: The decorated class is not a command, or its ``handle()`` is a coroutine or generator function. At a
            subclass: it has two bases with locks. In a run: another decorator of ``handle()`` is above this one.
        ValueError: *ttl*, *wait*, *max_hold* or *hold_for* is not a number of seconds, or *skip_exit_code* is no exit
            code.

    A run that does not get the lock raises ``CommandError``, with the exit code 75 when the lock is taken and 69 when
    too few nodes answer. A run that lost the lock raises ``CommandError`` with the exit code 76. If an option that the
    key needs has no value, the run raises ``CommandError``, too.
    """
    check_wait(wait)
    optional_seconds("ttl", ttl)
    optional_seconds("max_hold", max_hold)
    from_zero("hold_for", hold_for)
    check_switch("hold_on_error", hold_on_error)
    if not isinstance(skip_exit_code, int) or not 0 <= skip_exit_code <= 255:
        raise ValueError(f"skip_exit_code must be a whole number from 0 to 255, not {skip_exit_code!r}.")
    if isinstance(key, type) or getattr(key, "__name__", "") == "handle":  # written without parentheses
        return locked_command()(key)
    options = {"ttl": ttl, "wait": wait, "max_hold": max_hold, "hold_for": hold_for, "hold_on_error": hold_on_error}
    return LockedCommand(key, partial(_locked, key, options, skip_exit_code, using))


class LockedCommand:
    """
    The result of ``@locked_command(...)``.

    Args:
        key: What to lock. It is the ``handle()`` itself if there were no parentheses, and another decorator below
            hides its name; that shows when the class is made.
        lock: Returns a ``handle()`` under its lock, for the module of the command.
    """

    def __init__(self, key: Any, lock: Callable[[str, Any], Any]) -> None:
        self._key, self._lock = key, lock

    def __call__(self, target: Any, *args: object, **options: object) -> Any:
        """Return the class, or what becomes its ``handle()``; a decorator above passes a command, which is neither."""
        whole = isinstance(target, type) and issubclass(target, BaseCommand)
        handle: Any = target.handle if whole else target
        check_handle(handle, target)
        if self._key is not None:
            CommandKey(target.__module__, self._key)  # a mistake is an error here, and none of __set_name__()
        if not whole:
            return LockedHandle(handle, self._lock)
        if "handle" in vars(target) and handle in _handles:  # a subclass with a lock of its own
            target.handle = _handles[handle][1] or handle
        lock_class(target, "handle", partial(self._lock, target.__module__))
        return target

    def __set_name__(self, owner: Any, name: str) -> None:
        if name == "handle":
            locked_command()(self._key).__set_name__(owner, name)


class LockedHandle:
    """
    A decorated ``handle()``, until its class is made.

    Args:
        handle: The function that is decorated.
        lock: Returns it under its lock, for the module of the command.
    """

    def __init__(self, handle: Any, lock: Callable[[str, Any], Any]) -> None:
        self._handle, self._lock = handle, lock

    def __set_name__(self, owner: Any, name: str) -> None:
        setattr(owner, name, self._handle)
        lock_class(owner, name, partial(self._lock, owner.__module__))

    def __get__(self, command: Any, owner: Any = None) -> Any:
        return self if command is None else MethodType(self._lock(owner.__module__, self._handle), command)

    def __call__(self, *args: object, **options: object) -> Any:
        """Refuse to work for a decorator above, whose function the class has instead of this."""
        raise TypeError(f"@locked_command decorates {self._handle.__qualname__}() below another decorator. {ABOVE}")


def check_handle(handle: Any, target: Any) -> None:
    """
    Refuse to lock what is no ``handle()``, or what only begins its work after the call.

    Raises:
        TypeError: *handle*, which *target* is or has, is no function, or is a coroutine or generator function.
    """
    if not inspect.isfunction(handle):
        raise TypeError(f"@locked_command decorates a BaseCommand or its handle(), not {target!r}. {ABOVE}")
    if makes_coroutine(handle) or makes_generator(handle):
        name = handle.__qualname__
        raise TypeError(f"@locked_command cannot lock {name}(), whose body runs after the call. {INSTEAD_OF_COROUTINE}")


def lock_class(command: Any, name: str, lock: Lockable) -> None:
    """Lock the method of *command*; if that is its ``handle()``, a subclass has the same lock, or one of its own."""
    locked = lock(getattr(command, name))
    setattr(command, name, locked)
    if name != "handle":
        return
    inner, own = _locks.get(command), vars(command).get("__init_subclass__")
    _locks[command] = lock if inner is None else lambda handle: lock(inner(handle))
    _handles[locked] = _locks[command], None

    def locked_subclass(cls: Any, /, **options: Any) -> None:
        if own is None:
            super(command, cls).__init_subclass__(**options)
        else:
            own.__get__(None, cls)(**options)
        lock_subclass(cls)

    command.__init_subclass__ = classmethod(locked_subclass)


def lock_subclass(cls: Any) -> None:
    """
    Lock the ``handle()`` of a class that has the lock of a base, wherever that method comes from.

    Raises:
        TypeError: The method cannot be locked, or two bases have locks.
    """
    (command, lock), *others = inherited_locks(cls).items()
    if others:
        names = " and ".join(f"{each.__module__}.{each.__qualname__}" for each in (command, others[0][0]))
        raise TypeError(
            f"{cls.__qualname__} is a subclass of {names}, which have a lock each, and needs one of its own: "
            "write @locked_command(...) above its own handle()."
        )
    handle = inspect.getattr_static(cls, "handle")
    if cls is command or (handle in _handles and _handles[handle][0] is lock):
        return
    check_handle(handle, handle)
    cls.handle = lock(handle)
    _handles[cls.handle] = lock, handle


def inherited_locks(cls: type) -> dict[type, Lockable]:
    """Return the locks that *cls* has: its own, or else those of its bases, each with the class that is decorated."""
    if cls in _locks:
        return {cls: _locks[cls]}
    return {command: lock for base in cls.__bases__ for command, lock in inherited_locks(base).items()}


def _locked(
    key: Key[...] | None, options: dict[str, Any], skip_exit_code: int, using: str, module: str, handle: Any
) -> Any:
    """Return a ``handle()`` under its lock; one that the command calls while it has the lock runs as it is."""
    label = module.rpartition(".")[2]
    parsed = None if key is None else CommandKey(module, key)

    @wraps(handle)
    def locked(self: BaseCommand, *args: Any, **given: Any) -> Any:
        try:
            name = f"command:{parsed.resolve(ViewCall(HttpRequest(), (), given, given)) if parsed else label}"
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from None
        for outer in leases_of(self):
            if outer.name == name and outer.valid():
                with lent(self, outer):
                    return done(handle, handle(self, *args, **given))
        try:
            lock = locks[using].on_behalf(name, owner_here("command", label), **options)
        except (InvalidRedlockError, ValueError) as error:  # the settings, or a value that no lock's name can have
            raise CommandError(str(error)) from None
        lease = acquire(lock, skip_exit_code)
        if lease is None:
            return None
        began = False
        try:
            with lent(self, lease):
                began = True
                result = done(handle, handle(self, *args, **given))
        except BaseException as error:
            if not began:
                lease.hold.never_began()
            elif not (isinstance(error, SystemExit) and error.code in (None, 0)):  # the exit code of success
                lease.hold.failed()
            lease.release()
            raise
        give_up(lease)
        return result

    return locked


def done(handle: Any, result: Any) -> Any:
    """
    Return the *result* of a ``handle()``.

    Raises:
        TypeError: It is a generator or an awaitable, whose work is still to be done.
    """
    if not (left := work_left(result)):
        return result
    raise TypeError(
        f"{handle.__qualname__}() returned {left}, which would run without its lock. {INSTEAD_OF_COROUTINE}"
    )


def leases_of(command: BaseCommand) -> Sequence[Lease]:
    """Return the leases of the calls of *command* that run in this thread; those of another thread do not count."""
    thread, leases = vars(command).get(LEASES, (0, []))
    return leases if thread == get_ident() else []


@contextmanager
def lent(command: BaseCommand, lease: Lease) -> Iterator[None]:
    """
    Let *command* have the lease as ``self.lease`` in the block, and its outer lease again afterwards.

    Raises:
        CommandError: Another thread works with the same instance, whose ``self.lease`` is that of the other thread.
    """
    thread, leases = vars(command).setdefault(LEASES, (get_ident(), []))
    if thread != get_ident():
        raise CommandError(
            f"This instance of {type(command).__module__} works in another thread, and has the lease of that one; "
            "make an instance for each thread."
        )
    leases.append(lease)
    command.lease = lease  # type: ignore[attr-defined]
    try:
        yield
    finally:
        leases.pop()
        if leases:
            command.lease = leases[-1]  # type: ignore[attr-defined]
        else:
            del vars(command)[LEASES]


def acquire(lock: Lock, skip_exit_code: int) -> Lease | None:
    """
    Take the lock of a command; return None if the lock is taken and *skip_exit_code* is 0.

    Raises:
        CommandError: The lock is taken, or too few nodes answer; the exit code says which.
    """
    try:
        return lock.acquire()
    except LockTakenError as error:
        # The error says it already, and with exit code 0 nothing is to be printed, also where the log shows INFO.
        log.debug("command skipped: %s", error, extra={"event": "command_skipped", "lock": error.name})
        if skip_exit_code == 0:
            return None
        raise CommandError(f"Skipped: {error}", returncode=skip_exit_code) from error
    except QuorumUnavailableError as error:
        raise CommandError(str(error), returncode=NO_QUORUM) from error


def give_up(lease: Lease) -> None:
    """
    Release the lock of a command that is done, or leave it taken for the rest of its minimum hold.

    Raises:
        CommandError: The lock had ended before its release.
    """
    outcome = lease.release()
    if outcome in HAD_ENDED:
        why = explain(lease)
        raise CommandError(f"Done, but {why}; another run may have begun meanwhile.", returncode=LOST)


def explain(lease: Lease) -> str:
    """Return how a lock was lost, in words."""
    reason = lease.reason
    if reason is None or reason is EndReason.RELEASED:
        reason = EndReason.FORGOTTEN
    return f"the lock {lease.name!r} was lost: {EXPLANATIONS[reason]}"


class CommandKey(ViewKey):
    """The key of a command, whose fields are its options."""

    decorator = "locked_command"
    place = "option of the command"
    field, examples = "{supplier}", "{supplier} or {since.year}"
    occasion = "run"

    def __init__(self, command: str, key: Key[...]) -> None:
        super().__init__(command, key, inspect.signature(lambda **options: None))

    def read_source(self, text: str) -> list[Any]:
        """Return nothing: a command has options, but no user or session."""
        return []

    def check_constant(self, text: str) -> None:
        """Accept a key that is the same for every run, as most keys of commands are."""
