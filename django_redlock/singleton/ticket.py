"""
The information about its slot that a message carries, and the names of its locks (internal).
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from ..core.names import in_one_word
from ..core.protocol import HIGHEST, without_secrets
from ..core.rules import MAX_LIMIT, from_zero, is_whole

FORMAT = 3
LIFETIME, RUNNING, WAITING, BOTH = "until_executed", "while_executing", "until_executing", "until_and_while_executing"
PER_MESSAGE = ("hold_for", "wait_for")  # the options of a call that its message carries to the worker
ABSENT: list[Any] = [0, 1, None, -1]  # of a ticket that has no stamp, limit, own options and number of those before it
SCOPES = (LIFETIME, RUNNING, WAITING, BOTH)


class Permit(NamedTuple):
    """
    One permit of a lock that several may hold at once.

    Args:
        name: The name of the lock.
        number: Its number, from 1.
    """

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} #{self.number}"


_compact = json.JSONEncoder(separators=(",", ":"))


@without_secrets
@dataclass(slots=True)  # not frozen: each message has one, and creating a frozen one takes five times as long
class Ticket:
    """
    The information about its slot that a message carries as one text; treat it as immutable, use ``replace()``.

    A flat string passes through every broker. It holds the message's own id, because people start tasks with the
    headers of another message, and such a task must not inherit the slot.

    Args:
        name: Name of the lock; empty for a message that is to run without one. A worker uses this name even if a deploy
            has changed how the key is made.
        using: Alias in ``REDLOCK``.
        task_id: Id of the message's task.
        secret: Secret of the queued slot; empty if the message was sent without one.
        tries: How often a worker has sent the message back to the broker.
        scope: The option of this name: which slots there are while the message waits and while it runs.
        number: How many messages of a pending call there have been, including this one; 0 for any other call.
        waited: Seconds for which it has been put back to wait for its slot.
        watch: Secret of the note of the only copy that watches another; empty for all other messages.
        joined: Id of the task whose result it waits for; empty if it waits for none.
        redelivered: Whether the broker had delivered the message again when a worker put it back. A message that is put
            back is a new one for the broker, so it loses the broker's own mark.
        stamp: When a worker first got it, in microseconds since the epoch: the order in which those are served that
            wait for the same slot; 0 if it has no place in the line of that slot.
        limit: How many runs may have the slot at once, each with a permit of its own.
        own: The options of the call that differ from those of its task; None for none.
        behind: How many came before it in that line when it was put back, if the slot was free then; else -1.
    """

    name: str
    using: str
    task_id: str
    secret: str = ""
    tries: int = 0
    scope: str = LIFETIME
    number: int = 0
    waited: float = 0.0
    watch: str = ""
    joined: str = ""
    redelivered: bool = False
    stamp: int = 0
    limit: int = 1
    own: Mapping[str, Any] | None = None
    behind: int = -1

    @property
    def trailing(self) -> bool:
        """Whether it is the message of a pending call, which a later call may take over."""
        return self.number > 0

    @property
    def waiting(self) -> str:
        """Name of the lock that the message holds while it waits; empty if it holds none."""
        return self.following if self.number else self.queued

    @property
    def following(self) -> str:
        """Name of the lock that a pending call holds."""
        return f"next:{self.name}"

    @property
    def begun(self) -> "Ticket":
        """
        The ticket once the run has begun: no later call can take it over.

        Its slot may have to wait for the message again, if the process of the run is stopped or dies. It has a secret
        of its own then: nodes refuse the one with which the record of the pending call was freed.
        """
        return replace(self, number=0, secret=derived(self.secret, b"redlock run")) if self.trailing else self

    @property
    def without_slot(self) -> "Ticket":
        """The ticket of a message that has no slot while it waits."""
        return replace(self, secret="")

    @property
    def queued(self) -> str:
        """Name of the lock that calls with this key hold while they wait; empty if they hold none."""
        if self.scope == RUNNING:
            return ""
        return f"queued:{self.name}" if self.scope == BOTH else self.name

    @property
    def running(self) -> str:
        """Name of the lock that its run holds; empty if it holds none."""
        return "" if self.scope == WAITING else self.name

    @property
    def runs(self) -> "tuple[str | Permit, ...]":
        """The locks of which its run holds one; none if it holds none."""
        if self.limit > 1:
            return tuple(Permit(self.running, number + 1) for number in range(self.limit))
        return tuple(filter(None, (self.running,)))

    @property
    def waiter(self) -> str:
        """Name of the message in the queue of the lock; nodes notify nobody of its turn."""
        return f"message|0|{in_one_word(self.task_id)}"

    @property
    def turn(self) -> str:
        """Name of the lock under which the pending call of this key is changed."""
        return f"turn:{self.name}"

    @property
    def watching(self) -> str:
        """Name of the note of the copy that watches a run of the same message."""
        return f"watch:{self.task_id}"

    @property
    def cancelled(self) -> str:
        """Name of the note that the task was cancelled."""
        return f"cancelled:{self.task_id}"

    @property
    def alive(self) -> str:
        """Name of the lock that shows that a process has a task which has no slot."""
        return f"alive:{self.task_id}"

    def done(self, attempt: str) -> str:
        """Return the name of the note that one attempt of the task is done."""
        return f"done:{self.task_id}:{attempt}"

    def begins(self, attempt: str) -> str:
        """Return the name of the note that one attempt of the task has begun, which must not run twice."""
        return f"begun:{self.task_id}:{attempt}"

    def places(self, trails: bool) -> list[str]:
        """
        Return the names of all locks that calls with this key may hold, for a run and for waiting messages.

        Args:
            trails: Whether a duplicate may run after the holder.
        """
        after = self.following if trails else ""
        return list(dict.fromkeys(filter(None, (self.running, self.queued, after))))

    def pack(self) -> str:
        """Return the text that the message carries."""
        # Not dataclasses.astuple(), which copies deeply: this runs for every message.
        mine = (self.name, self.using, self.task_id, self.secret, self.tries, self.scope)
        put_back = (self.number, self.waited, self.watch, self.joined, self.redelivered)
        # Older workers do not know what follows. They make the ticket from the arguments, and it has the same names.
        more: tuple[Any, ...] = (self.stamp, self.limit, self.own) if self.stamp or self.limit > 1 or self.own else ()
        more += (self.behind,) if more and self.behind >= 0 else ()
        return _compact.encode([FORMAT, *mine, *put_back, *more])

    @classmethod
    def unpack(cls, text: object, task_id: str | None) -> "Ticket | None":
        """Return the ticket in a text, or None if there is none or it belongs to another task."""
        with suppress(TypeError, ValueError, OverflowError, RecursionError):
            version, name, using, owner, secret, tries, scope, number, waited, watch, joined, again, *more = json.loads(
                text  # type: ignore[arg-type]
            )
            stamp, limit, own, behind = more + ABSENT[len(more) :]
            valid = is_secret(secret) and is_secret(watch)
            valid = valid and is_whole(stamp, 0, HIGHEST) and is_whole(limit, 1, MAX_LIMIT)
            valid = valid and is_whole(behind, -1, HIGHEST)
            valid = valid and (own is None or (isinstance(own, dict) and own.keys() <= {*PER_MESSAGE}))
            lengths = own.items() if valid and own else ()
            valid = valid and all(length is None or from_zero(name, length) >= 0 for name, length in lengths)
            if version == FORMAT and owner == task_id and valid and scope in SCOPES:
                done = (int(tries), scope, int(number), float(waited), watch, str(joined), bool(again))
                return cls(str(name), str(using), owner, secret, *done, stamp, limit, own, behind)
        return None


def is_secret(value: Any) -> bool:
    """Return whether *value* can be a lock's secret, or is empty, which stands for none."""
    return isinstance(value, str) and bool(re.fullmatch("([0-9a-f]{32})?", value))


def began_name(task_id: str) -> str:
    """Return the name of the note about the message of a pending call that has begun."""
    return f"began:{task_id}"


def began_secret(secret: str) -> str:
    """Return the secret of the note; a node that cancelled an attempt with the message's own would refuse that."""
    return derived(secret, b"redlock began")


def derived(secret: str, purpose: bytes) -> str:
    """Return another secret for a message, which only those know who know its own; empty if it has none."""
    return blake2b(secret.encode(), digest_size=16, person=purpose).hexdigest() if secret else ""
