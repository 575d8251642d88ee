"""
Inspect a node, for the doctor and for the panel of nodes (internal).

A kind of node that can be asked more than whether it is there has a method ``inspect``, which takes the arguments of
:func:`inspect` but the node, and raises LinkError if nothing answers.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from ..core.protocol import Failure
from ..core.rules import Rules
from .base import LinkError, Node, shown


class Level(StrEnum):
    """How bad a finding is; a str, so that users' code and JSON documents show it as text."""

    NOTE = "note"
    WARNING = "warning"  # locks work, but will surprise
    ERROR = "error"  # locks fail, or may be held twice


class Finding(NamedTuple):
    """
    One problem that the doctor found.

    Args:
        id: The finding's stable name; for a problem that the settings alone show, the id of the system check.
        level: How bad it is.
        text: What is wrong, and its possible consequences.
        remedy: What to do.
        node: The node's display name, which the doctor adds; empty if the problem concerns all nodes.
    """

    id: str
    level: Level
    text: str
    remedy: str
    node: str = ""


def note(id: str, text: str, remedy: str) -> Finding:
    """Return a finding that is no trouble."""
    return Finding(id, Level.NOTE, text, remedy)


def warning(id: str, text: str, remedy: str, node: str = "") -> Finding:
    """Return a finding that will surprise."""
    return Finding(id, Level.WARNING, text, remedy, node)


def error(id: str, text: str, remedy: str, node: str = "") -> Finding:
    """Return a finding that makes locks fail, or lets two hold one."""
    return Finding(id, Level.ERROR, text, remedy, node)


@dataclass(frozen=True, slots=True)
class Inspection:
    """
    The result of the inspection of one node.

    Args:
        name: The node's display name.
        detail: Why the node could not be inspected, as text for people; empty if it could.
        failure: The same reason, for decisions.
        round_trip: Seconds that the shortest of a few round trips took.
        ahead: How many seconds the node's clock is ahead of ours, give or take half a round trip.
        info: What the node reports about itself; empty if it reports nothing.
        refused: The rights that the user lacks, as in ``ACL SETUSER``.
        encrypted: Whether the connection is encrypted.
        local: Whether the connection stays on this machine.
        ignored: Options of redis-py in the URL that are not used.
        known: Whether this kind of node can be inspected at all.
        user: The user as whom locks connect.
        deaf: The servers that were asked for the master in vain, each with the reason.
        guide: The kind of those servers, such as "sentinel"; empty if the URL names the master.
        mode: The mode in which the node's server must run.
        age: How many seconds the server has served these locks; None if it does not report that.
        facts: What a node of another kind reports about itself, for the checks of that kind.
        checks: Checks of settings that only this kind of node has; each gets the inspection and the rules of the alias.
    """

    name: str
    detail: str = ""
    failure: Failure | None = None
    round_trip: float = 0.0
    ahead: float = 0.0
    info: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    encrypted: bool = False
    local: bool = False
    ignored: tuple[str, ...] = ()
    known: bool = True
    user: str = "default"
    deaf: tuple[str, ...] = ()
    guide: str = ""
    mode: str = "standalone"
    age: float | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    checks: "tuple[Callable[[Inspection, Rules], Iterator[Finding]], ...]" = ()

    @property
    def store(self) -> str:
        """The kind of a replicated store and its oldest version, such as "etcd 3.4.23"; empty for other nodes."""
        return " ".join(filter(None, (self.facts.get("kind"), self.facts.get("version"))))

    @property
    def server(self) -> str:
        """The kind of the server."""
        return "Valkey" if "valkey_version" in self.info else "Redis"

    @property
    def version(self) -> str:
        """The version of the server, or the oldest one in a replicated store; empty if it is unknown."""
        return self.info.get("valkey_version") or self.info.get("redis_version") or self.facts.get("version", "")

    def number(self, what: str) -> int:
        """Return a number that the server reports; 0 if it does not report it."""
        try:
            return int(float(self.info.get(what, "0")))
        except ValueError:
            return 0


def inspect_all(nodes: tuple[Node, ...], timeout: float, *, rights: bool = True) -> list[Inspection]:
    """Inspect all nodes at once; a node that does not answer costs *timeout* seconds a few times."""
    with ThreadPoolExecutor(len(nodes) or 1, thread_name_prefix="django_redlock inspect") as pool:
        return list(pool.map(lambda node: inspect(node, timeout, rights=rights), nodes))


def inspect(node: Node, timeout: float, *, rights: bool = True) -> Inspection:
    """
    Inspect one node.

    Args:
        node: The node; unless its kind can be asked more, this finds out only whether it can be reached.
        timeout: Seconds to wait for each answer.
        rights: Whether to try each command that locks need.
    """
    own = getattr(node, "inspect", None)
    try:
        if own is None:
            node.connect(timeout).close()
            return Inspection(node.name, known=False)
        found: Inspection = own(timeout, rights=rights)
    except LinkError as error:
        return Inspection(node.name, detail=error.detail, failure=error.failure, known=False)
    return replace(found, facts={name: shown(fact) for name, fact in found.facts.items()})
