"""
The transactions of a request to a locked view: under ``ATOMIC_REQUESTS``, they are opened inside the lock.

Django opens them around the function that a URL leads to, so a lock of the view would be inside, and released before
the commit. Only ``_non_atomic_requests`` keeps Django from it, a set that decorators, classes and their subclasses
share and change in place: what one view writes there, others read. So locks do not touch that mark. They leave one of
their own on what they wrap, and Django's handler, which looks at the view before each request, finds it there.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dis import get_instructions
from functools import cache, partial, wraps
from inspect import unwrap
from itertools import pairwise
from types import CodeType
from typing import Any, Protocol

from asgiref.sync import iscoroutinefunction
from django.core.handlers.base import BaseHandler
from django.db import connections, transaction
from django.http import HttpRequest

from ..frameworks import framework_of, is_framework

MARK = "_redlock_locks"
LEFT = "_redlock_transactions"

ACTIONS = ("create", "list", "retrieve", "update", "partial_update", "destroy")
ASYNC_ACTIONS = ("acreate", "alist", "aretrieve", "aupdate", "partial_aupdate", "adestroy")
METHODS = ("get", "head", "post", "put", "patch", "delete", "options", "trace")
HANDLERS = frozenset({*METHODS, *ACTIONS, *ASYNC_ACTIONS})
"""The methods of Django's and the frameworks' view classes that handle a request."""


class RequestLock(Protocol):
    """The lock of a view or of one of its methods, as far as the transactions depend on it."""

    def takes(self, method: str | None, handlers: Collection[str]) -> bool:
        """Return whether a request takes the lock, if these methods of its view class handle it."""
        ...


def locks_of(view: Any) -> tuple[RequestLock, ...]:
    """Return the locks that a view, or a method of a view class, takes when it is called; the outermost comes first."""
    locks: tuple[RequestLock, ...] | None = getattr(view, MARK, None)
    if locks is None and isinstance(view, partial):
        return locks_of(view.func)
    if locks is None:
        return tuple(lock for function in framework_of(view).within(view) for lock in locks_of(function))
    return locks


def locks_before(view: Any) -> tuple[RequestLock, ...]:
    """
    Return the locks that are taken around a view as a whole; the outermost comes first.

    A mixin of Django's in front of a locked class hides its mark, but only checks permissions and calls ``super()``.
    What the project adds to such a check, as in ``test_func()``, runs before the lock, outside the transaction. The
    project's own ``dispatch()`` may belong into the transaction, so Django opens that, and the lock refuses it.
    """
    for base in () if (locks := locks_of(view)) or class_of(view) is None else class_of(view).__mro__:
        dispatch = vars(base).get("dispatch")
        if dispatch is not None and ((locks := locks_of(dispatch)) or not is_mixin(dispatch)):
            break
    return locks


def mark(view: Any, locks: tuple[RequestLock, ...]) -> None:
    """Note on a function which locks it takes; decorators copy the note, as they copy Django's marks."""
    setattr(view, MARK, locks)


def class_of(view: Any) -> Any:
    """Return the class of a view that ``as_view()`` has made, or that of ``@api_view``; None for other functions."""
    while isinstance(view, partial):
        view = view.func
    for name in ("view_class", "cls"):  # which in other callables may be anything
        owner = getattr(view, name, None)
        if isinstance(owner, type) and hasattr(owner, "http_method_names"):
            return owner
    return None


def actions_of(view: Any) -> Mapping[str, str]:
    """Return which method of a ViewSet handles each HTTP method, as passed to ``as_view()``; empty for other views."""
    actions = getattr(view, "actions", None)
    return actions if class_of(view) is not None and isinstance(actions, Mapping) else {}


def handler_of(owner: Any, actions: Mapping[str, str] | None, method: str | None) -> str:
    """Return the name of the method of a view class that handles requests with an HTTP method."""
    name, actions = (method or "").lower(), actions or {}
    if name == "head" and not hasattr(owner, name) and name not in actions:
        name = "get"
    return actions.get(name, name)


def methods_of(owner: Any) -> set[str]:
    """Return the HTTP methods that a view class may handle, in lower case: the usual ones, and those that it adds."""
    return {*METHODS, *getattr(owner, "http_method_names", ())}


def code_of(method: Any) -> CodeType | None:
    """Return the code of a method without its decorators; None for what is no function."""
    return getattr(unwrap(method), "__code__", None)


def names_in(method: Any) -> set[str]:
    """Return the names that the code of a method uses; what is called and is no function may use ``super``."""
    if code := code_of(method):
        return {*code.co_names, *code.co_freevars}
    return {"super"} if callable(method) else set()


def is_mixin(dispatch: Any) -> bool:
    """Return whether a ``dispatch()`` is a framework's and leads to that of the next class."""
    return is_framework(unwrap(dispatch)) and "super" in names_in(dispatch)


def calls(method: Any) -> frozenset[str]:
    """Return the methods that a method calls on its object, as in ``self.post()``, but not on ``super()``."""
    return _calls(code) if (code := code_of(method)) else frozenset()


@cache
def _calls(code: CodeType) -> frozenset[str]:
    return frozenset(
        step.argval
        for before, step in pairwise(get_instructions(code))
        # Two names may be loaded by one instruction: "request, self".
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and before.argrepr.split(", ")[-1] in code.co_varnames[:1]
    )


def chain(owner: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """Yield the methods of a name that run, each with its class, as long as one calls that of a base class."""
    for number, base in enumerate(owner.__mro__, 1):
        if name in vars(base):
            method = vars(base)[name]
            yield base, method
            names = names_in(method)
            if "super" not in names and not any(each.__name__ in names for each in owner.__mro__[number:-1]):
                break


def reached(owner: Any, name: str, *, by_project: bool = False) -> set[str]:
    """
    Return the names of the handlers that run for a request that *name* handles.

    Some of the frameworks' only call another: ``put()`` calls ``update()`` or ``post()``, and ``partial_update()``
    calls ``update()``. The project's own handlers may do anything before such a call, so only the checks look at theirs
    (*by_project*).
    """
    names, found = [name], {name}
    for each in names:
        for base, method in chain(owner, each):
            if by_project or is_framework(base):
                new = HANDLERS.intersection(calls(method)) - found
                if by_project:  # it may also call an action
                    new |= {call for call in calls(method) if locks_of(getattr(owner, call, None))} - found
                names += new
                found |= new
    return found


def passed_to(owner: Any, name: str) -> list[str]:
    """Return those of the handlers that run for a request to which only the frameworks' code leads."""
    names = [name]
    for each in names:
        base = next((base for base in owner.__mro__ if each in vars(base)), None)
        if base is not None and is_framework(base):
            names += HANDLERS.intersection(calls(vars(base)[each])).difference(names)
    return names


def dispatches(owner: Any) -> bool:
    """Return whether a view class has a ``dispatch()`` of the project, which may change data before a method runs."""
    methods = [vars(base)["dispatch"] for base in owner.__mro__ if "dispatch" in vars(base)]
    return not all(is_framework(unwrap(method)) for method in methods)


def handles(owner: Any) -> bool:
    """Return whether the ``dispatch()`` of a view class may lead to a handler; one that calls no other may not."""
    return any(is_framework(unwrap(method)) or "getattr" in names_in(method) for _, method in chain(owner, "dispatch"))


def locks_taken(view: Any, method: str | None) -> tuple[RequestLock, ...]:
    """
    Return the locks that a request takes before code of the project runs; the outermost comes first.

    The transactions are left to these locks. A method may have a lock of which its class does not know, because another
    decorator is above it. Where a method or a ``dispatch()`` of the project leads to that one, Django opens the
    transactions and the lock refuses them: what the project's code has changed before would not be rolled back.
    """
    locks, owner = locks_before(view), class_of(view)
    if owner is None:
        return tuple(lock for lock in locks if lock.takes(method, ()))
    handler = handler_of(owner, actions_of(view), method)
    for name in () if dispatches(owner) else passed_to(owner, handler):
        locks += tuple(lock for lock in locks_of(getattr(owner, name, None)) if lock not in locks)
    names = reached(owner, handler)
    return tuple(lock for lock in locks if lock.takes(method, names))


def locks_later(view: Any, method: str | None) -> Iterator[tuple[str, RequestLock]]:
    """Yield the other locks that a request takes, as far as is known, each with the name of its method."""
    if (owner := class_of(view)) is not None:
        handler = handler_of(owner, actions_of(view), method)
        names, taken = reached(owner, handler, by_project=True), locks_taken(view, method)
        for name in sorted(names):
            for lock in locks_of(getattr(owner, name, None)):
                if lock not in taken and lock.takes(method, names):
                    yield name, lock


def locks_within(view: Any) -> tuple[RequestLock, ...]:
    """Return the locks that requests to a view, or to other URLs of its class, take before they run."""
    locks, owner = locks_before(view), class_of(view)
    if owner is None:
        return locks
    names = {*HANDLERS, *methods_of(owner), *actions_of(view).values()}
    return locks + tuple(lock for name in names for lock in locks_of(getattr(owner, name, None)))


def own_request(request: Any) -> HttpRequest:
    """Return Django's own request, which that of another framework wraps."""
    inner: HttpRequest = getattr(request, "_request", request)
    return inner


@contextmanager
def transactions(request: HttpRequest, lock: RequestLock) -> Iterator[bool]:
    """
    Open the transactions that were left to this lock of a request; yield whether there are any.

    The note is back at the end, because a decorator above may call the view again, as one that retries does.
    """
    about = vars(own_request(request))
    left, aliases = about.get(LEFT, (None, ()))
    if left is not lock:
        yield False
        return
    del about[LEFT]
    try:
        with _opened(aliases):
            yield bool(aliases)
    finally:
        about[LEFT] = lock, aliases


@contextmanager
def _opened(aliases: Iterable[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for alias in reversed([*aliases]):  # in the order in which Django nests them
            stack.enter_context(transaction.atomic(using=alias))
        yield


_make_view_atomic = BaseHandler.make_view_atomic


@wraps(_make_view_atomic)
def make_view_atomic(handler: BaseHandler, view: Callable[..., Any]) -> Callable[..., Any]:
    """Return the view in the transactions of a request; if it takes a lock, that opens them."""
    exempt: set[str] = getattr(view, "_non_atomic_requests", set())
    atomic = (alias for alias, database in connections.settings.items() if database["ATOMIC_REQUESTS"])
    aliases = [alias for alias in atomic if alias not in exempt]
    if not aliases or iscoroutinefunction(view) or not locks_within(view):
        return _make_view_atomic(handler, view)

    @wraps(view)
    def in_transactions(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        locks = locks_taken(view, request.method)
        if not locks:
            with _opened(aliases):
                return view(request, *args, **kwargs)
        setattr(request, LEFT, (locks[-1], aliases))
        return view(request, *args, **kwargs)

    in_transactions._non_atomic_requests = {*exempt, *aliases}  # type: ignore[attr-defined]
    return _make_view_atomic(handler, in_transactions)


# Django has no hook between the URL and the transactions, and its own mark is shared, see above.
BaseHandler.make_view_atomic = make_view_atomic  # type: ignore[method-assign, assignment]
