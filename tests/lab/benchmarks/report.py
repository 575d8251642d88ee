"""
What was measured, and what is asked of it: printed as tables, and put into ``tables.md``.

The text of that file is fixed, except between ``<!-- figures: KEY -->`` and ``<!-- end -->``: the table of the section
with that key. A section that a run has not measured stays as it is.
"""

import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..tables import heads, row
from .measure import Times

OURS, THEIRS = "django_redlock, with lock(name)", "redis-py, with client.lock(name)"
SCALES = {"s": 1, "ms": 1e3, "µs": 1e6}
TABLES = Path(__file__).with_name("tables.md")
MARKED = re.compile(r"(<!-- figures: (?P<key>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PACKAGES = (
    *("Django", "redis", "hiredis", "celery", "django-redis", "pottery", "redlock-py", "python-redis-lock"),
    *("aioredlock", "celery-once", "celery-singleton", "uvloop"),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """
    One measured number.

    Args:
        name: The contender, or the case.
        value: The number; the median, if it is a time.
        unit: ``µs``, ``ms``, ``s``, ``/s``, ``%``, ``×`` or the things counted.
        more: Further figures in the same unit, such as ``{"p95": 1.2, "CPU": 0.3}``.
        limit: What is asked of it.
        least: Whether the limit is a lower limit.
    """

    name: str
    value: float
    unit: str = ""
    more: dict[str, float] = field(default_factory=dict)
    limit: float | None = None
    least: bool = False

    @property
    def kept(self) -> bool | None:
        """Whether it is as asked; None if nothing is asked."""
        if self.limit is None:
            return None
        return self.value >= self.limit if self.least else self.value <= self.limit

    @property
    def asked(self) -> str:
        """The limit and the verdict in words."""
        if self.limit is None:
            return ""
        return f"{'≥' if self.least else '≤'} {number(self.limit)}: {'ok' if self.kept else 'short'}"


@dataclass(slots=True)
class Section:
    """
    One question and its answer.

    Args:
        key: Its name in ``tables.md``.
        question: What is measured.
        figures: The results; the ones in the first one's unit are compared with it.
        left_out: What could not be measured, and why.
    """

    key: str
    question: str
    figures: list[Figure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, name: str, value: float, unit: str = "", limit: float | None = None, least: bool = False) -> None:
        """Add one figure."""
        self.figures.append(Figure(name, value, unit, limit=limit, least=least))

    def add_times(self, times: Mapping[str, Times], unit: str = "µs") -> None:
        """Add the median, the 95th percentile and the processor time of each contender."""
        scale = SCALES[unit]
        for name, each in times.items():
            more = {"p95": each.percentile(95) * scale} | ({"CPU": each.cpu * scale} if each.cpus else {})
            self.figures.append(Figure(name, each.median * scale, unit, more))

    def compare(self, other: str, limit: float, *, ours: str = OURS, cpu: bool = False) -> None:
        """Add the ratio of our figure to *other*'s, unless one of them is missing."""
        mine, theirs = self._figure(ours), self._figure(other)
        if mine and theirs:
            ratio = mine.more["CPU"] / theirs.more["CPU"] if cpu else mine.value / theirs.value
            name = f"{ours}, against {other}" + (", CPU" if cpu else "")
            self.add(name, ratio, "×", limit, least=mine.unit == "/s")

    def _figure(self, name: str) -> Figure | None:
        return next((figure for figure in self.figures if figure.name == name), None)


def number(value: float) -> str:
    """Return a number with three significant digits."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _ratio(figure: Figure, section: Section) -> str:
    first = section.figures[0]
    return number(figure.value / first.value) if first.value and figure.unit == first.unit else ""


def lines(section: Section) -> Iterable[str]:
    """Yield the lines of a section as they are printed."""
    yield f"\n{section.key}: {section.question}"
    for figure in section.figures:
        more = "  ".join(f"{name} {number(value)}" for name, value in figure.more.items())
        ratio = f"{_ratio(figure, section):>7} {more}  {figure.asked}"
        yield f"  {figure.name:<64} {number(figure.value):>9} {figure.unit:<5} {ratio}".rstrip()
    for each in section.left_out:
        yield f"  left out: {each}"


def render(page: str, sections: Iterable[Section]) -> str:
    """Return the page with the figures of a run in it."""
    known = {section.key: section for section in sections}

    def fill(match: re.Match[str]) -> str:
        if match["key"] == "environment":
            return match[1] + ", ".join(_environment()) + "\n" + match[3]
        return (
            match[1] + "\n".join(_table(known[match["key"]])) + "\n" + match[3] if match["key"] in known else match[0]
        )

    return MARKED.sub(fill, page)


def _table(section: Section) -> Iterator[str]:
    extra = list(dict.fromkeys(name for figure in section.figures for name in figure.more))
    asked = any(figure.asked for figure in section.figures)
    yield heads(["", "", "×", *extra, *(["asked"] if asked else [])], numbers=True)
    for figure in section.figures:
        more = [number(figure.more[name]) if name in figure.more else "" for name in extra]
        cells = [figure.name, f"{number(figure.value)} {figure.unit}", _ratio(figure, section), *more]
        yield row([*cells, *([figure.asked] if asked else [])])
    for each in section.left_out:
        yield f"\nLeft out: {each}"


def _environment() -> Iterator[str]:
    yield f"Python {platform.python_version()}"
    yield f"system {platform.system()} {platform.machine()}"
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} not installed"
