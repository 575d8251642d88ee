"""
The value of a lock's key: the holder's secret and, for people, who holds it.

A process that knows the secret can extend and release the lock, so no part of the secret is ever shown. The rest is a
small JSON object that the admin and ``redis-cli`` can read. It holds nothing secret.
"""

import json
import re
from functools import lru_cache
from hashlib import blake2b
from json.encoder import encode_basestring_ascii as quoted
from typing import Literal, NamedTuple

HolderKind = Literal["manual", "task", "view", "model", "command"]
"""The kind of work that holds a lock, for people."""

SHARED_KIND = "shared"  # in the key of a shared lock, which describes none of its holders
SECRET_SIZE = 32  # hexadecimal digits: 128 random bits
MAX_LABEL = 120  # characters
MAX_REF = 1000  # characters; programs compare refs with those they know, so a real ref must not be cut

_read = json.JSONDecoder().raw_decode
_LEASE = re.compile(
    r',"ttl":(\d+(?:\.\d+)?)(?:,"process":"([^"\\]*)")?,"since":\d+(?:\.\d+)?(?:,"extensions":\d+)?}\Z', re.ASCII
)  # the end of a value of this package; a quotation mark inside a label has a backslash before it


class Owner(NamedTuple):
    """
    Who holds a lock.

    Args:
        host: Name of the machine.
        pid: Process id.
        kind: ``manual``, ``task``, ``view``, ``model`` or ``command``.
        label: The holder's work, such as a task's name; cut to 120 characters.
        ref: What identifies the work to programs, such as a task's id; cut to 1000 characters.
        since: When the lock was taken, in seconds since the epoch on the holder's clock.
        ttl: Length of the lease, in seconds.
        process: Identifies the holder's process, so that its heartbeat can be looked up; empty if the lock does not
            depend on a process.
        extensions: How often the lease was extended.
    """

    host: str = ""
    pid: int = 0
    kind: str = "manual"
    label: str = ""
    ref: str = ""
    since: float = 0.0
    ttl: float = 0.0
    process: str = ""
    extensions: int = 0

    def __str__(self) -> str:
        what = " ".join(filter(None, (self.kind, self.label, self.ref)))
        return f"{what} on {self.host}:{self.pid}" if self.host else what


def encode(secret: str, owner: Owner) -> str:
    """Return the value to store under the holder's key."""
    return f"{secret}{_lasting(owner)}{json.dumps(owner.since)}}}"


def encode_since(secret: str, owner: Owner, since: float) -> str:
    """Return the value of :func:`encode` for a hold that began at *since*."""
    return f"{secret}{_lasting(owner)}{since!r}}}"


def counted(value: str, extensions: int) -> str:
    """Return *value*, as :func:`encode` made it, with the number of *extensions* added."""
    return f'{value[:-1]},"extensions":{extensions}}}' if value.endswith("}") else value


def uncounted(value: str) -> str:
    """Return a stored value, with or without its secret, as it was before the first extension."""
    before, extended, _ = value.rpartition(',"extensions":')
    return f"{before}}}" if extended else value


def _lasting(owner: Owner) -> str:
    """Return the part of the value that all holds of *owner* share: everything but the start time at its end."""
    # Not cached as a whole: each call of a task has a ref of its own, so a cached text with the ref would never be used
    # again.
    process = f',"process":{quoted(owner.process)}' if owner.process else ""
    start = _start(owner.host, owner.pid, owner.kind, owner.label)
    return f'{start}{quoted(owner.ref[:MAX_REF])},"ttl":{owner.ttl!r}{process},"since":'


@lru_cache(maxsize=1024)
def _start(host: str, pid: int, kind: str, label: str) -> str:
    """Return the beginning of the object, up to its ``ref``."""
    fields = {"host": host, "pid": pid, "kind": kind, "label": label[:MAX_LABEL]}
    return json.dumps(fields, separators=(",", ":"))[:-1] + ',"ref":'


def decode(text: str) -> Owner | None:
    """Return the owner that a value describes, with or without its secret; None if this package did not write it."""
    try:
        fields, end = _read(text, text.index("{"))
        if text[end:].strip():
            return None
        return Owner(
            str(fields["host"]),
            int(fields["pid"]),
            str(fields["kind"]),
            str(fields["label"]),
            str(fields["ref"]),
            float(fields["since"]),
            float(fields["ttl"]),
            str(fields.get("process", "")),
            int(fields.get("extensions", 0)),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, AttributeError):
        return None


@lru_cache(maxsize=4096)
def lease_of(text: str) -> tuple[float, str]:
    """
    Return the lease's length and the process from a value that :func:`decode` takes; 0 and empty for a foreign one.

    A listing needs these two fields of thousands of locks, and the others only of the few that it shows. So nothing
    else is read.
    """
    found = _LEASE.search(text, text.rfind(',"ttl":'))
    if found:
        return float(found[1]), found[2] or ""
    owner = decode(text)
    return (owner.ttl, owner.process) if owner else (0.0, "")


def secret_of(value: str) -> str:
    """Return the part of a stored value that identifies its owner: the secret, or all of another program's value."""
    return value[:SECRET_SIZE] if value[SECRET_SIZE : SECRET_SIZE + 1] in ("", "{") else value


def fingerprint(value: str) -> str:
    """Return a short digest that tells holders apart on a page without revealing their secrets."""
    return _digest(secret_of(value))


def fingerprint_of_sharers(last: int) -> str:
    """
    Return a fingerprint of the holders that share a lock, from the fencing token of the *last* one to join.

    The key of a shared lock has no secret. So the fingerprint changes whenever a holder joins, but not when one leaves.
    """
    return _digest(f"shared {last}")


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=6, person=b"redlock").hexdigest()
