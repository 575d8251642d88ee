"""
The names of locks, the keys that they map to, and the holders that these keys name (internal).

A name becomes a *slug*. The slug of a short name is ``{name}``; that of a long name is its beginning and a digest,
``{beginning}~digest``. The keys of a lock are ``prefix + slug + ":h"`` (holder) and ``":f"`` (fence). The mapping is
injective. The prefix has no brace, so the first brace ends it, and the suffix is fixed. The slug of a short name ends
in a brace, that of a long name in a hexadecimal digit. ``#number`` after either stands for one of several permits.

The value of a holder key is the holder's secret and, for people, who holds the lock. A process that knows the secret
can extend and release the lock, so no part of the secret is ever shown. The rest is a small JSON object that the admin
and ``redis-cli`` can read. It holds nothing secret.
"""

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Literal, NamedTuple

from .protocol import PERMITS

MAX_PLAIN = 200  # bytes; a longer name is shown by its beginning and a digest
MAX_NAME = 8192  # bytes; a longer text is a document rather than a name
MAX_NAMES = 10_000  # names in one lock
LISTED = 20  # names of one lock that are shown to people
SHOWN = 120  # characters of a long name that stay readable
HEARTBEAT = "}~p"  # the end of the slugs under which processes store their heartbeats; no lock's slug ends so

HolderKind = Literal["manual", "task", "view", "model", "command"]
"""The kind of work that holds a lock, for people."""

HELD = "held"  # the state of a lock whose work is over, and which stays taken for a minimum time
NOTE = "note"  # the state of a lock that nobody waits for, and that only records something
SENDS = "sends"  # the state of the note about a message whose run is about to send another one that continues its work
GOES_ON = "goes on"  # the state of the note about a message that is done, and whose work another one continues
SHARED_KIND = "shared"  # in the key of a shared lock, which describes none of its holders
SECRET_SIZE = 32  # hexadecimal digits: 128 random bits
MAX_LABEL = 120  # characters
MAX_WORD = 200  # bytes of a label in the name of a waiter
MAX_REF = 1000  # characters; programs compare refs with those they know, so a real ref must not be cut
MAX_STATE = 40  # characters
MAX_HOST = 255  # characters
MAX_KIND = 20  # characters
MAX_PROCESS = 40  # characters, also in _LEASE

IN_STATE_HELD = f'"state":"{HELD}"'
"""What every value of a lock in that state contains, and few others."""

_read = json.JSONDecoder().raw_decode
_LEASE = re.compile(
    r',"ttl":(\d+(?:\.\d+)?)(?:,"process":"([^"\\]{0,40})")?,"since":\d+(?:\.\d+)?(?:,"extensions":\d+)?}\Z', re.ASCII
)  # the end of a value of this package; a quotation mark inside a label has a backslash before it


def check_name(name: object) -> str:
    """
    Return *name* if it can name a lock.

    Raises:
        TypeError: It is not a string.
        ValueError: It is empty, too long, or not valid Unicode.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"A lock's name must be a str, not {type(name).__name__}; write lock(str(...)) or lock(f'order:{{pk}}')."
        )
    if not name:
        raise ValueError("A lock's name must not be empty; name what it protects, such as lock('order:7').")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"The lock's name {name[:40]!r} has characters that UTF-8 cannot encode.") from None
    if size > MAX_NAME:
        raise ValueError(
            f"A lock's name may have {MAX_NAME} bytes, and the one that begins with {name[:40]!r} has {size}; "
            "use an identifier or a digest of the value."
        )
    return name


def check_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """
    Return the names of one lock, sorted and without repetitions.

    Raises:
        TypeError: A name is not a string.
        ValueError: There is no name, there are too many, or one of them cannot name a lock.
    """
    if isinstance(names, str):
        return (check_name(names),)
    if callable(names):
        called = getattr(names, "__name__", "name")
        raise TypeError(f"@lock needs a name in parentheses; write, for example, @lock({called!r}).")
    if is_text(names) or not isinstance(names, Iterable):
        check_name(names)
    checked = tuple(sorted({check_name(name) for name in names}))
    if not checked:
        raise ValueError("lock([]) names nothing to lock; pass at least one name.")
    if len(checked) > MAX_NAMES:
        raise ValueError(f"One lock may have {MAX_NAMES} names, not {len(checked)}; split the work into batches.")
    return checked


def is_text(value: object) -> bool:
    """Return whether *value* is a str or bytes, or behaves as a str as Django's lazy ones do: no list of strings."""
    return isinstance(value, bytes) or hasattr(value, "encode")


def named(names: tuple[str, ...]) -> str:
    """Return the names of one lock for people: the first few, and how many there are."""
    more = len(names) - LISTED
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:LISTED])} and {more} more"


@lru_cache(maxsize=1024)
def slug(name: str) -> str:
    """Return the part of the keys that stands for *name*."""
    encoded = name.encode()
    if len(encoded) <= MAX_PLAIN:
        return "{" + name + "}"
    return "{" + name[:SHOWN] + "…}~" + blake2b(encoded, digest_size=16).hexdigest()


def is_cut(name: str) -> bool:
    """Return whether *name* looks like a long name that was cut to be shown, and so is probably no lock's name."""
    return len(name) == SHOWN + 1 and name.endswith("…")


def permit_slug(slug: str, number: int) -> str:
    """Return the slug of one permit, counted from 1, of a lock that several may hold."""
    return f"{slug}#{number}"


def queue_of(slug: str) -> str:
    """Return the slug of the lock that a permit belongs to, whose queue counts; empty for any other slug."""
    base, _, number = slug.rpartition("#")
    return base if number.isdigit() else ""


def heartbeat(process: str) -> str:
    """Return the slug under which a process stores its heartbeat; no lock's name has this slug."""
    return "{" + process + HEARTBEAT


def process_of(slug: str) -> str:
    """Return the process whose heartbeat has this slug; empty for any other slug."""
    return slug[1 : -len(HEARTBEAT)] if slug.endswith(HEARTBEAT) else ""


def shown(slug: str) -> str:
    """Return the name to show for a slug: a long name is cut short, and a permit's number follows the name."""
    name, _, behind = slug[1:].rpartition("}")
    if not name:
        raise ValueError(f"not a lock's name: {slug!r}")
    _, has_number, number = behind.partition("#")
    return f"{name} #{number}" if has_number else name


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
        state: The state of a singleton's slot that no run has: ``claimed`` or ``queued``. ``held`` for a lock or slot
            whose work is over, and which stays taken for a minimum time. For a lock that only records something,
            ``note``, or ``goes on`` if another message continues the work. Else empty.
        call: What a singleton tells others of its key: ``singleton/pending.py`` about a call that comes after the
            present one, ``singleton/line.py`` about a run.
        hold: The least time for which the lock stays taken, in seconds; 0 if it ends with its work.
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
    state: str = ""
    call: str = ""
    hold: float = 0.0

    @property
    def is_note(self) -> bool:
        """Whether it holds no lock, but records something under a name of its own."""
        return self.state in (NOTE, SENDS, GOES_ON)

    @property
    def work(self) -> str:
        """The holder's work and its state, for people."""
        return f"{self.label} ({self.state})" if self.state else self.label

    def __str__(self) -> str:
        what = " ".join(filter(None, (self.kind, self.work, self.ref)))
        return f"{what} on {self.host}:{self.pid}" if self.host else what


def encode(secret: str, owner: Owner) -> str:
    """Return the value to store under the holder's key."""
    return encode_since(secret, owner, owner.since)


def encode_since(secret: str, owner: Owner, since: float) -> str:
    """Return the value of :func:`encode` for a hold that began at *since*."""
    # Only the beginning is cached: each call of a task has a ref of its own, so a text with the ref would never be used
    # again.
    start = _start(owner.host, owner.pid, owner.kind, owner.label, owner.state)
    call = f',"call":{quoted(owner.call[:MAX_STATE])}' if owner.call else ""
    hold = f',"hold":{owner.hold!r}' if owner.hold else ""
    process = f',"process":{quoted(owner.process)}' if owner.process else ""
    return f'{secret}{start}{quoted(owner.ref[:MAX_REF])}{call}{hold},"ttl":{owner.ttl!r}{process},"since":{since!r}}}'


@lru_cache(maxsize=1024)
def _start(host: str, pid: int, kind: str, label: str, state: str) -> str:
    """Return the beginning of the object, up to its ``ref``."""
    fields = {"host": host, "pid": pid, "kind": kind, "label": label[:MAX_LABEL]}
    fields |= {"state": state[:MAX_STATE]} if state else {}
    return json.dumps(fields, separators=(",", ":"))[:-1] + ',"ref":'


@lru_cache(maxsize=1024)
def in_one_word(label: str) -> str:
    """Return a label without blanks, which separate the waiters in a node's reply, and short enough for a queue."""
    word = re.sub(r"\s", "\u00a0", label[:MAX_LABEL]).encode(errors="replace")
    return word[:MAX_WORD].decode(errors="ignore")


def counted(value: str, extensions: int) -> str:
    """Return *value*, as :func:`encode` made it, with the number of *extensions* added."""
    return f'{value[:-1]},"extensions":{extensions}}}' if value.endswith("}") else value


def uncounted(value: str) -> str:
    """Return a stored value, with or without its secret, as it was before the first extension."""
    before, extended, _ = value.rpartition(',"extensions":')
    return f"{before}}}" if extended else value


def decode(text: str) -> Owner | None:
    """
    Return the owner that a value describes, with or without its secret; None if this package did not write it.

    A text that UTF-8 cannot encode, or that is longer than this package writes it, is left out: requests and pages
    could not carry it, and a part of it may name something else.
    """
    try:
        fields, end = _read(text, text.index("{"))
        if text[end:].strip():
            return None
        return Owner(
            _text(fields["host"], MAX_HOST),
            int(fields["pid"]),
            _text(fields["kind"], MAX_KIND),
            _text(fields["label"], MAX_LABEL),
            _text(fields["ref"], MAX_REF),
            float(fields["since"]),
            float(fields["ttl"]),
            _text(fields.get("process", ""), MAX_PROCESS),
            int(fields.get("extensions", 0)),
            _text(fields.get("state", ""), MAX_STATE),
            _text(fields.get("call", ""), MAX_STATE),
            float(fields.get("hold", 0.0)),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, AttributeError):
        return None


def _text(value: object, most: int) -> str:
    """Return a text of a description; an empty one if it is longer, or if UTF-8 cannot encode it."""
    text = str(value)
    try:
        return text if len(text) <= most and text.encode() else ""
    except UnicodeEncodeError:
        return ""


def about_holder(text: str) -> dict[str, Any]:
    """Return what errors and logs tell of the holder that a value describes; empty if nothing is known of it."""
    holder = decode(text)
    if holder is None:
        return {}
    several = dict.fromkeys(("host", "pid", "since")) if holder.kind == SHARED_KIND else {}
    return holder._asdict() | several


@lru_cache(maxsize=64)
def common_value(limit: int) -> str:
    """Return the value that all permits of a lock with this limit store under its name; it describes none of them."""
    return encode(f"{PERMITS}{limit}".ljust(SECRET_SIZE, "-"), Owner(kind=SHARED_KIND, label=f"limit={limit}"))


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


def is_kept(about: str) -> bool:
    """Return whether the work of the holder that a value describes is over, and the lock stays taken for a while."""
    return IN_STATE_HELD in about and (owner := decode(about)) is not None and owner.state == HELD


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
