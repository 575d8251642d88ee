"""
Run one view under a lock: resolve its key, take its lock, and open its transactions (internal).

Under ``ATOMIC_REQUESTS``, Django would open the transaction around the decorated view and commit after the lock is
released. A guarded view therefore keeps Django from opening a transaction, and opens the same ones itself, inside the
lock.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial, wraps
from typing import Any, Literal, get_args

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.db import connections, transaction
from django.http import HttpRequest

from ..core.protocol import LOST
from ..engine.lease import Lease, arelease_at_end, release_at_end
from ..engine.lock import Lock, decorators
from ..exceptions import LockTakenError, QuorumUnavailableError
from ..handler import in_transaction, lock, locks
from ..keys import Call, Key, ViewKey
from ..routers import reads_pinned
from ..views import OnBusy, refuse

MARGIN = 1 / 20  # share of the ttl that must be left for a commit, as in fenced()
Method = Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]
KNOWN_METHODS = frozenset(get_args(Method))
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
SIMILAR = 0.75  # to a method's name; the names of WebDAV are less similar

log = logging.getLogger("django_redlock")


@dataclass(frozen=True, slots=True)
class Options:
    """The checked options of :func:`~django_redlock.views.locked_view`."""

    key: Key
    ttl: float | None
    wait: float | None
    methods: frozenset[str] | None
    on_busy: OnBusy
    using: str
    example: Lock = field(init=False)
    """A lock with these options, for the system checks."""

    def __post_init__(self) -> None:
        name = f"view:{self.key}" if isinstance(self.key, str) and self.key else "view:..."
        example = lock(name, ttl=self.ttl, wait=self.wait, using=self.using)
        object.__setattr__(self, "example", example)  # the class is frozen
        decorators.add(example)


def check_methods(methods: Iterable[str] | None) -> frozenset[str] | None:
    """
    Return the methods to lock, in upper case; None stays None and means all methods that change data.

    Raises:
        TypeError: *methods* is not a list of str.
        ValueError: *methods* is empty, or has a misspelt method.
    """
    if methods is None:
        return None
    if isinstance(methods, str):
        raise TypeError(f"methods must be a list such as [{methods.upper()!r}], not the str {methods!r}.")
    given = list(methods) if isinstance(methods, Iterable) else [methods]
    if not isinstance(methods, Iterable) or not all(isinstance(method, str) for method in given):
        raise TypeError(f"methods must be a list such as ['POST'], not {methods!r}.")
    chosen = frozenset(method.upper() for method in given)
    for method in sorted(chosen - KNOWN_METHODS):
        for close in get_close_matches(method, KNOWN_METHODS, 1, SIMILAR):
            raise ValueError(f"methods has {method!r}; did you mean {close!r}?")
    if not chosen:
        raise ValueError("methods=[] locks no request; name at least one, or leave it out for all that change data.")
    return chosen | {"HEAD"} if "GET" in chosen else chosen  # Django serves HEAD with the view for GET


# The two flavours


def guarded(guard: "Guard", view: Callable[..., Any]) -> Any:
    """Return a blocking view that runs under its lock."""

    @wraps(view)
    def locked(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        guard.check(request)
        if not guard.applies(request):
            with guard.transactions():
                return view(request, *args, **kwargs)
        lock = guard.lock(request, args, kwargs)
        try:
            lease = lock.acquire()
        except (LockTakenError, QuorumUnavailableError) as error:
            return guard.refuse(request, error)
        try:
            # The request before this one may have changed the row that the key stands for: read it where it is written.
            with reads_pinned(connections), guard.transactions():
                response = guard.finished(view(request, *args, **kwargs))
                guard.ensure(lease)
        except BaseException:
            release_at_end(lease)
            raise
        if keep_while_streaming(response, lease):
            return response
        guard.note(release_at_end(lease))
        return response

    locked._non_atomic_requests = guard.exempt  # type: ignore[attr-defined]
    return locked


def guarded_async(guard: "Guard", view: Callable[..., Any]) -> Any:
    """Return an asynchronous view that runs under its lock."""

    @wraps(view)
    async def locked(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        guard.check(request)
        guard.refuse_atomic_requests()
        if not guard.applies(request):
            return await view(request, *args, **kwargs)
        lock = await sync_to_async(guard.lock)(request, args, kwargs)  # the key may read the user or the session
        try:
            lease = await lock.aacquire()
        except (LockTakenError, QuorumUnavailableError) as error:
            return await sync_to_async(guard.refuse)(request, error)
        try:
            with reads_pinned(connections):
                response = await view(request, *args, **kwargs)
            guard.ensure(lease)
        except BaseException:
            await arelease_at_end(lease)
            raise
        if keep_while_streaming(response, lease):
            return response
        guard.note(await arelease_at_end(lease))
        return response

    locked._non_atomic_requests = guard.exempt  # type: ignore[attr-defined]
    return locked


def keep_while_streaming(response: Any, lease: Lease) -> bool:
    """
    Let a streaming response release the lock when it is closed; return whether the response is streaming.

    Servers close every response, even if the client has gone away. If a middleware drops the response and returns
    another, nothing releases the lock: the lease is dropped as well and ends with its ttl.
    """
    if not getattr(response, "streaming", False):
        return False
    response._resource_closers.append(partial(release_at_end, lease))  # any thread may close it, so not async
    return True


class OwnTransactions(set[str]):
    """
    The databases for which a view wants no transaction; ``in`` claims that it contains every database.

    Django tests with ``in``, so it opens no transaction around the lock, whatever ``DATABASES`` will say.
    ``@transaction.non_atomic_requests`` works below and above ``@locked_view``, because it adds to this set.
    """

    def __contains__(self, alias: object) -> bool:
        return True


class Guard:
    """
    One view under a lock: its name, key, lock and transactions.

    Args:
        name: The view's dotted name.
        signature: The view's signature, for the names of its arguments.
        options: The options of the decorator.
        asynchronous: Whether the view is a coroutine function.
        below: The databases for which the view wants no transaction.
    """

    prefix = "view"

    def __init__(
        self,
        name: str,
        signature: inspect.Signature,
        options: Options,
        *,
        asynchronous: bool = False,
        below: set[str] | None = None,
    ) -> None:
        self.name = name
        self.asynchronous = asynchronous
        self.options = options
        self._signature = signature
        self._key = ViewKey(name, options.key, signature)
        self._below = set() if below is None else below
        self.exempt = self._exempt()

    @classmethod
    def of_view(cls, view: Callable[..., Any], options: Options) -> "Guard":
        """Return the guard of a function or method."""
        name, owner = _identify(view)
        # A method bound by method_decorator is a partial that wraps the function with `self`.
        return cls(
            name,
            inspect.signature(view, follow_wrapped=not isinstance(view, partial)),
            options,
            asynchronous=iscoroutinefunction(view) or getattr(owner, "view_is_async", False),
            below=getattr(view, "_non_atomic_requests", set()),
        )

    def check(self, request: object) -> None:
        """
        Make sure that the view is called with a request, and not as a method.

        Raises:
            TypeError: The view's first argument is not a request.
        """
        if not hasattr(request, "META"):
            raise TypeError(
                f"@locked_view on {self.name} got a {type(request).__name__} instead of a request. Decorate the class, "
                "with methods=[...] if needed, or write @method_decorator(locked_view(...)) above the method."
            )

    def applies(self, request: HttpRequest) -> bool:
        """Return whether requests with this request's method are locked."""
        method = request.method or ""
        return method not in SAFE_METHODS if self.options.methods is None else method in self.options.methods

    def lock(self, request: HttpRequest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lock:
        """
        Return the lock of a request, without a network call.

        Raises:
            BadRequest: The client left out a value that the key needs.
            ImproperlyConfigured: The key has no value for another reason.
            RuntimeError: A transaction is open, so the lock would be released before the commit.
        """
        self._refuse_transactions()
        options = self.options
        call = Call(request, args, kwargs, self._arguments(request, args, kwargs))
        name = f"{self.prefix}:{self._key.resolve(call)}"
        label = f"{self.name} {request.method}"
        return locks[options.using].claim(name, ttl=options.ttl, wait=options.wait, kind="view", label=label)

    def refuse(self, request: HttpRequest, error: LockTakenError | QuorumUnavailableError) -> Any:
        """Return the answer to a request that did not get the lock."""
        return refuse(request, error, self.options.on_busy)

    def ensure(self, lease: Lease) -> None:
        """
        Make sure before the commit that the lock is still held, and long enough for the commit.

        Raises:
            LockLostError: The lock is lost, or too little time is left.
        """
        lease.ensure(lease.ttl * MARGIN if self._atomic_aliases() else 0.0)

    @contextmanager
    def transactions(self) -> Iterator[None]:
        """Open the transactions that Django would open around this view."""
        with ExitStack() as stack:
            for alias in self._atomic_aliases():
                stack.enter_context(transaction.atomic(using=alias))
            yield

    def refuse_atomic_requests(self) -> None:
        """Refuse async views as Django does; a decorated class may have hidden the view from Django's own check."""
        if self._atomic_aliases():
            raise RuntimeError(f"You cannot use ATOMIC_REQUESTS with async views, such as {self.name}.")

    def finished(self, response: Any) -> Any:
        """Return the response; refuse an awaitable, which would only run after the lock is released."""
        if inspect.isawaitable(response):
            if inspect.iscoroutine(response):
                response.close()
            raise TypeError(
                f"@locked_view on {self.name}: the view is asynchronous, but looks like a synchronous function. Put "
                "@locked_view directly on the coroutine function."
            )
        return response

    def note(self, outcome: str) -> None:
        """Log an error if the lock was gone at its release; the view has already committed by then."""
        if outcome in LOST:
            log.error(
                "the lock of view %s ended before the view did (%s); another request may have run beside it",
                self.name,
                outcome,
                extra={"event": "view_lock_lost", "view": self.name},
            )

    def _atomic_aliases(self) -> list[str]:
        return [
            alias
            for alias, database in connections.settings.items()
            if database["ATOMIC_REQUESTS"] and alias not in self._below and not set.__contains__(self.exempt, alias)
        ]

    def _exempt(self) -> set[str]:
        if isinstance(self._below, OwnTransactions):  # an inner @locked_view opens the transactions
            return self._below
        return set(self._below) if self.asynchronous else OwnTransactions(self._below)

    def _refuse_transactions(self) -> None:
        for connection in connections.all(initialized_only=True):
            if in_transaction(connection):
                raise RuntimeError(
                    f"@locked_view on {self.name} is inside a transaction of database {connection.alias!r}, which "
                    "would commit after the lock is released. Under ATOMIC_REQUESTS decorate the class itself, not "
                    "a method; or put @transaction.non_atomic_requests on top, as above @api_view; and use "
                    "functools.wraps() in your own decorators. Otherwise move the transaction into the view."
                )

    def _arguments(self, request: HttpRequest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind_partial(request, *args, **kwargs)
        bound.apply_defaults()
        return bound.arguments | kwargs | {"request": request}


def _identify(view: Callable[..., Any]) -> tuple[str, type | None]:
    """Return a view's dotted name, and its class if the view is the function or a method of a view class."""
    instance = getattr(getattr(view, "func", None), "__self__", None)  # set if method_decorator bound it
    owner = getattr(view, "view_class", None) if instance is None else type(instance)
    named = owner or view
    if named.__module__ == "django.utils.decorators":  # method_decorator tries a decorator on a dummy
        return "a class", None
    return f"{named.__module__}.{getattr(named, '__qualname__', named)}", owner
