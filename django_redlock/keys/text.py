"""What values become in the keys of tasks and of views."""

from contextlib import suppress
from datetime import UTC, datetime
from hashlib import blake2b


def escaped(text: str, special: frozenset[str]) -> str:
    """Return *text* with a percent sign and the code in place of each *special* character."""
    return "".join(_percent(character) if character in special else character for character in text)


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())


def digest(text: str) -> str:
    """Return 32 hexadecimal digits that stand for a text."""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def in_utc(moment: datetime) -> datetime:
    """Return a moment in UTC; one without a time zone, or whose year UTC does not have, as it is."""
    with suppress(OverflowError):
        return moment if moment.utcoffset() is None else moment.astimezone(UTC)
    return moment
