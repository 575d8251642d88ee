"""
The value of a lock's key: the holder's nonce and, for people, who holds it.

A process that knows the nonce can extend and release the lock, so no part of the nonce is ever shown. The rest is a
small JSON object that the admin and ``redis-cli`` can read. It holds nothing secret.
"""

import json
import re
from functools import lru_cache
from hashlib import blake2b
from json.encoder import encode_basestring_ascii as quoted
from typing import Literal, NamedTuple

HolderKind = Literal["manual", "task", "view", "model", "command"]
"""What holds a lock, for people."""

SHARED_KIND = "shared"  # under the key of those who share a lock: it describes none of them
NONCE_SIZE = 32  # hexadecimal digits: 128 random bits
MAX_LABEL = 120  # characters
MAX_REF = 1000  # characters: programs compare it with what they know, so it must not be cut where it might be longer

_read = json.JSONDecoder().raw_decode
_LEASE = re.compile(
    r',"ttl":(\d+(?:\.\d+)?)(?:,"process":"([^"\\]*)")?,"since":\d+(?:\.\d+)?(?:,"extensions":\d+)?}\Z', re.ASCII
)  # the end of what we write; a quotation mark inside a label has a backslash before it


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
        ttl: Length of its lease, in seconds.
        process: Tells its process from all others, so that it can be looked up whether that lives; empty if the lock
            does not depend on a process.
        extensions: How often it was extended.
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


def encode(nonce: str, owner: Owner) -> str:
    """Return the value to store under the holder's key."""
    return f"{nonce}{_lasting(owner)}{json.dumps(owner.since)}}}"


def encode_since(nonce: str, owner: Owner, since: float) -> str:
    """Return the same for a hold that began at *since*."""
    return f"{nonce}{_lasting(owner)}{since!r}}}"


def counted(value: str, extensions: int) -> str:
    """Return a stored value, as :func:`encode` made it, of a holder that was extended so often."""
    return f'{value[:-1]},"extensions":{extensions}}}' if value.endswith("}") else value


def uncounted(value: str) -> str:
    """Return a stored value, or one without its nonce, as it was before the first extension."""
    before, extended, _ = value.rpartition(',"extensions":')
    return f"{before}}}" if extended else value


def _lasting(owner: Owner) -> str:
    """Return what is the same for each hold of *owner*: all but the end, which says since when."""
    # Written out because each call of a task has a ref of its own: a cached text that contains it would not be used
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
    """Return the owner that a value, or a value without its nonce, describes; None if it is not ours."""
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
    Return the length of the lease and the process in what :func:`decode` takes; of what is not ours, 0 and nothing.

    A listing needs these two of thousands of locks and the rest of the few that it shows, so nothing else is read.
    """
    found = _LEASE.search(text, text.rfind(',"ttl":'))
    if found:
        return float(found[1]), found[2] or ""
    owner = decode(text)
    return (owner.ttl, owner.process) if owner else (0.0, "")


def nonce_of(value: str) -> str:
    """Return the part of a stored value that identifies its owner: the nonce, or all of another program's value."""
    return value[:NONCE_SIZE] if value[NONCE_SIZE : NONCE_SIZE + 1] in ("", "{") else value


def fingerprint(value: str) -> str:
    """Return a short digest that tells holders apart on a page without revealing their nonces."""
    return _digest(nonce_of(value))


def fingerprint_of_sharers(last: int) -> str:
    """
    Return the same for those who share a lock, by the fencing token of the *last* of them to join.

    Their key has no nonce. So it changes whenever another joins, and not when one of them leaves.
    """
    return _digest(f"shared {last}")


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=6, person=b"redlock").hexdigest()
