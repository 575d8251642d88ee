"""What values become in the keys of tasks and of views."""

from contextlib import suppress
from datetime import UTC, datetime
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from hashlib import blake2b

LONG_EXPONENT = 1000


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


def without_trailing_zeros(value: Decimal) -> Decimal:
    """Return the number in the form that all equal numbers share, whatever the thread's decimal context is."""
    if not value.is_finite():
        return value
    return Context(max(1, len(value.as_tuple().digits)), Emin=MIN_EMIN, Emax=MAX_EMAX).normalize(value) or Decimal(0)


def decimal_text(value: Decimal) -> str:
    """Return the text of a number, the same for equal numbers: without an exponent unless that is very long."""
    value = without_trailing_zeros(value)
    return format(value, "f") if abs(value.adjusted()) < LONG_EXPONENT else str(value)
