"""What the tests look at: which slots are taken, and what messages say of them."""

from typing import Any

from django_redlock import locks
from django_redlock.celery.slots import HEADER, Ticket

NAME = "task:shop.sync:shop_id=7"


def tickets(worker: Any) -> list[Ticket]:
    """Return the tickets of the messages that wait."""
    found = [Ticket.unpack(headers[HEADER], headers["id"]) for headers in worker.headers]
    assert all(found)
    return found


def names() -> set[str]:
    """Return the names of all locks that are held, without the notes of what is done."""
    rows = locks["default"].survey(count=100)[0].rows
    held = {row.slug.strip("{}") for row in rows if row.value}
    return {name for name in held if not name.startswith(("done:", "began:"))}
