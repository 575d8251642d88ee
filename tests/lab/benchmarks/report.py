"""What was measured: printed as tables, and put between ``<!-- figures: KEY -->`` and ``<!-- end -->`` of tables.md."""

import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..tables import heads, row
from .bench import Times

OURS, THEIRS = "django_redlock, with lock(name)", "redis-py, with client.lock(name)"
SCALES = {"ms": 1e3, "µs": 1e6}
TABLES = Path(__file__).with_name("tables.md")
MARKED = re.compile(r"(<!-- figures: (?P<key>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PACKAGES = ("Django", "redis", "hiredis", "pottery", "python-redis-lock", "redlock-py")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number; of times, the median."""

    name: str  # of the contender, or of the case
    value: float
    unit: str
    more: dict[str, float] = field(default_factory=dict)  # such as {"p95": 1.2, "CPU": 0.3}, in the same unit
    asked: str = ""  # its target, and whether it is met


@dataclass(slots=True)
class Section:
    """One question and its answer; figures in the first one's unit are compared with that."""

    key: str  # in tables.md
    question: str
    figures: list[Figure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # what could not be measured, and why

    def add(self, name: str, value: float, unit: str) -> None:
        """Add one figure."""
        self.figures.append(Figure(name, value, unit))

    def add_times(self, times: Mapping[str, Times], unit: str = "µs") -> None:
        """Add the median, the 95th percentile and the processor time of each contender."""
        scale = SCALES[unit]
        for name, each in times.items():
            more = {"p95": each.p95 * scale} | ({"CPU": each.cpu * scale} if each.cpus else {})
            self.figures.append(Figure(name, each.median * scale, unit, more))

    def compare(self, other: str, limit: float, *, ours: str = OURS, cpu: bool = False) -> None:
        """Add the ratio of our time to *other*'s, which is to have the limit, unless one of them is missing."""
        named = {figure.name: figure for figure in self.figures}
        if ours in named and other in named:
            mine, theirs = named[ours], named[other]
            ratio = mine.more["CPU"] / theirs.more["CPU"] if cpu else mine.value / theirs.value
            name = f"{ours}, against {other}" + (", CPU" if cpu else "")
            asked = f"≤ {number(limit)}: {'ok' if ratio <= limit else 'short'}"
            self.figures.append(Figure(name, ratio, "×", asked=asked))


def number(value: float) -> str:
    """Return a number with three significant digits."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def render(page: str, sections: Iterable[Section]) -> str:
    """Return the page with the figures of a run in it."""
    tables = {section.key: "\n".join(table(section)) for section in sections} | {"environment": environment()}

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{tables[match['key']]}\n{match[3]}" if match["key"] in tables else match[0]

    return MARKED.sub(fill, page)


def table(section: Section) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    first = section.figures[0]
    extra = list(dict.fromkeys(name for figure in section.figures for name in figure.more))
    asked = any(figure.asked for figure in section.figures)
    yield heads(["", "", "×", *extra, *(["asked"] if asked else [])], numbers=True)
    for figure in section.figures:
        more = [number(figure.more[name]) if name in figure.more else "" for name in extra]
        ratio = number(figure.value / first.value) if figure.unit == first.unit else ""
        cells = [figure.name, f"{number(figure.value)} {figure.unit}", ratio, *more]
        yield row([*cells, *([figure.asked] if asked else [])])
    for each in section.left_out:
        yield f"\nLeft out: {each}"


def environment() -> str:
    found = [f"Python {platform.python_version()}", f"system {platform.system()} {platform.machine()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)
