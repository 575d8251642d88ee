"""
Map lock names to keys, one to one (internal).

A name becomes a *slug*. The slug of a short name is ``{name}``; that of a long name is its beginning and a digest,
``{beginning}~digest``. The keys of a lock are ``prefix + slug + ":h"`` (holder) and ``":f"`` (fence). The mapping is
injective. The prefix has no brace, so the first brace ends it, and the suffix is fixed. The slug of a short name ends
in a brace, that of a long name in a hexadecimal digit. ``#number`` after either stands for one of several permits.
"""

from collections.abc import Iterable
from hashlib import blake2b

MAX_PLAIN = 200  # bytes; a longer name is shown by its beginning and a digest
MAX_NAME = 8192  # bytes; a longer text is a document rather than a name
MAX_NAMES = 10_000  # names in one lock
LISTED = 20  # names of one lock that are shown to people
SHOWN = 120  # characters of a long name that stay readable
HEARTBEAT = "}~p"  # the end of the slugs under which processes store their heartbeats; no lock's slug ends so


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
    if isinstance(names, bytes) or not isinstance(names, Iterable):
        check_name(names)
    checked = tuple(sorted({check_name(name) for name in names}))
    if not checked:
        raise ValueError("lock([]) names nothing to lock; pass at least one name.")
    if len(checked) > MAX_NAMES:
        raise ValueError(f"One lock may have {MAX_NAMES} names, not {len(checked)}; split the work into batches.")
    return checked


def named(names: tuple[str, ...]) -> str:
    """Return the names of one lock for people: the first few, and how many there are."""
    more = len(names) - LISTED
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:LISTED])} and {more} more"


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
    """Return the slug whose queue counts for a permit of a lock that several may hold; empty for any other slug."""
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
