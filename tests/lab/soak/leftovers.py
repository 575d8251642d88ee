"""
The remaining keys on the lock nodes, and the messages that the broker has lost.

With Redis as broker, kombu takes a message out of its list (BRPOP) before it records it as not acknowledged
(``unacked``). A worker that is killed between the two takes the message with it. The soak proves this for each message:
it is nowhere in the broker, and ``Loss.proof()`` has further evidence.
"""

import os
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import redis

from django_redlock.core.names import decode
from django_redlock.testing import Servers

SLOTS = ("{task:", "{queued:", "{next:", "{watch:", "{replaced:")
NOTE, NOTE_LASTS = "{done:", 61.0  # seconds


@dataclass(frozen=True)
class Slot:
    """A key of ours on one node."""

    node: int
    name: str
    task: str
    queued: bool
    seconds: float

    def __str__(self) -> str:
        state = "queued" if self.queued else "not queued"
        return f"{self.name} on node {self.node} for {self.seconds:.0f} s more, {state}, task {self.task}"

    def waits_everywhere(self, slots: list["Slot"], nodes: Servers) -> bool:
        """Return whether a quorum of nodes has it as the caller took it."""
        same = {slot.node for slot in slots if (slot.name, slot.task, slot.queued) == (self.name, self.task, True)}
        return len(same) > len(nodes) // 2

    def missed(self, slots: list["Slot"], nodes: Sized, doer: int | None, killed: set[int]) -> bool:
        """Return whether too few nodes for a slot have it, as *doer* died before it could free it on a node again."""
        same = {slot.node for slot in slots if (slot.name, slot.task) == (self.name, self.task)}
        return len(same) <= len(nodes) // 2 and doer in killed


def left(nodes: Servers) -> list[Slot]:
    """Return every key on every node that is a slot or a note, whether or not the node's index knows it."""
    found = []
    for place, node in enumerate(nodes):
        with node.client() as client:
            for key in client.scan_iter("*:h", count=1000):
                name = "{" + key.partition("{")[2].removesuffix(":h")
                value, seconds = client.get(key), client.pttl(key) / 1000
                owner = decode(value or "")
                if value and (name.startswith(SLOTS) or (name.startswith(NOTE) and seconds > NOTE_LASTS)):
                    queued = bool(owner and owner.state == "queued")
                    found.append(Slot(place, name, owner.ref if owner else "", queued, seconds))
    return found


class Loss:
    """Evidence on whether a message was lost between the broker and a worker."""

    def __init__(self, book: Any) -> None:
        url = os.environ["SOAK_BROKER"]
        self.possible = url.startswith("redis://")
        self._book = book
        self._client = redis.Redis.from_url(url) if self.possible else None

    def gone(self, task: str) -> bool:
        """Return whether the broker has no message of a task any more."""
        return self._client is not None and not self._has(self._client, task)

    def proof(self, task: str, slots: list[Slot], nodes: Servers) -> str:
        """Return the evidence that the broker lost a message of a task; empty if there is none."""
        if not self.gone(task):
            return ""
        events = self._book.broker_events(task)
        if not events:
            return "no worker ever noted it"
        if "noted" in events.values():
            return "put back after its worker was killed, taken out again and not noted"
        if again := self._book.never_noted(task):
            return f"sent again, and no worker ever noted {again} of its messages"
        waits = [slot for slot in slots if slot.task == task and slot.waits_everywhere(slots, nodes)]
        return "its slot is as its sender took it" if waits else ""

    @staticmethod
    def _has(client: "redis.Redis", task: str) -> bool:
        lists = [client.lrange(key, 0, -1) for key in client.scan_iter(_type="list")]
        hashes = [client.hvals(key) for key in client.scan_iter(_type="hash")]
        return any(task.encode() in message for messages in (*lists, *hashes) for message in messages)
