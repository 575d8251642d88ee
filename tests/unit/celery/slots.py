"""What the tests look at: which slots are taken, and what messages say of them."""

from dataclasses import replace
from typing import Any

from billiard.einfo import ExceptionInfo
from celery.exceptions import WorkerLostError

from django_redlock import locks
from django_redlock.singleton.slots import HEADER, RUN_HEADER, Ticket
from tests.shop.helpers import is_free

NAME = "task:shop.sync:shop_id=7"


def ticket_in(headers: Any) -> Ticket | None:
    """Return the ticket of a message."""
    return Ticket.unpack(headers.get(HEADER), headers["id"])


def put_back(headers: Any, tries: int) -> None:
    """Let a message say that it has been put back so often."""
    ticket = ticket_in(headers)
    assert ticket
    headers[HEADER] = replace(ticket, tries=tries).pack()


def tickets(worker: Any) -> list[Ticket]:
    """Return the tickets of the messages that wait."""
    found = [ticket_in(headers) for headers in worker.headers]
    assert all(found)
    return found


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


def begin(request: Any) -> Any:
    """Take the slot as the child does that runs the message; return its lease."""
    ticket = Ticket.unpack(request.request_dict[HEADER], request.id)
    assert ticket
    return ticket.take_running({"ttl": 30.0, "max_hold": None}, "shop.sync", request.request_dict[RUN_HEADER])


def set_down(nodes: Any, down: bool = True) -> None:
    """Take nodes away, or bring them back."""
    for node in nodes:
        node.down = down


def taken(name: str = NAME) -> bool:
    """Return whether somebody has the lock."""
    return not is_free(name)
