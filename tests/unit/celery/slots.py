"""What the tests look at: which slots are taken, and what messages say of them."""

from types import SimpleNamespace
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import TimeLimitExceeded
from celery.exceptions import WorkerLostError

from django_redlock import locks
from django_redlock.celery.dispatch import HEADER, RUN_HEADER
from django_redlock.singleton.driver import Nodes
from django_redlock.singleton.questions import Take
from django_redlock.singleton.ticket import Ticket
from tests.shop.helpers import is_free

NAME = "task:shop.sync:shop_id=7"


def ticket_in(headers: Any) -> Ticket | None:
    """Return the ticket of a message."""
    return Ticket.unpack(headers.get(HEADER), headers["id"])


def names() -> set[str]:
    """Return the names of all locks that are held, without the notes of what is done."""
    rows = locks["default"].survey(count=100)[0].rows
    held = {row.slug.strip("{}") for row in rows if row.value}
    return {name for name in held if not name.startswith(("done:", "began:"))}


def die(request: Any) -> None:
    """Tell the main process that the child is dead."""
    try:
        raise WorkerLostError("killed")
    except WorkerLostError:
        request.on_failure(ExceptionInfo())


def end_child(request: Any, event: str) -> None:
    """Tell the main process how a child ended."""
    match event:
        case "child dies":
            die(request)
        case "exceeds its hard limit":
            try:
                raise TimeLimitExceeded(1)
            except TimeLimitExceeded:
                request.on_failure(ExceptionInfo())
            request.on_timeout(False, 1)
        case "is terminated":
            request.terminate(SimpleNamespace(terminate_job=lambda pid, signal: None), "TERM")


def begin(request: Any) -> Any:
    """Take the slot as the child does that runs the message; return its lease."""
    ticket = Ticket.unpack(request.request_dict[HEADER], request.id)
    assert ticket
    return take_slot(ticket, request.request_dict[RUN_HEADER])


def take_slot(ticket: Ticket, secret: str = "") -> Any:
    """Take the slot for a run of a message, as another process does; returns the lease."""
    return Nodes(ticket.using, "shop.sync", {"ttl": 30.0, "max_hold": None}).take(Take(ticket, secret))


def set_down(nodes: Any, down: bool = True) -> None:
    """Take nodes away, or bring them back."""
    for node in nodes:
        node.down = down


def taken(name: str = NAME) -> bool:
    """Return whether somebody has the lock."""
    return not is_free(name)
