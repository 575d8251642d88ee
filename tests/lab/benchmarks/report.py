"""
What was measured and what the target is, as a table and as JSON.
"""

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

OURS = "django_redlock"

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
        unit: ``µs``, ``ms``, ``s``, ``/s``, ``%`` or the things counted.
        more: Further figures in the same unit, such as ``{"p95": 1.2, "cpu": 0.3}``.
    """

    name: str
    value: float
    unit: str
    more: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Target:
    """
    One row of the table of targets, and its result.

    Args:
        case: What is compared, in words.
        measured: The result.
        limit: The target.
        unit: The unit of both; ``×`` for a ratio.
        least: Whether the limit is a lower limit.
        floor: What raw sockets reach with the same requests, packed in advance; None where that was not measured.
    """

    case: str
    measured: float
    limit: float
    unit: str = "×"
    least: bool = False
    floor: float | None = None

    @property
    def kept(self) -> bool:
        """Whether the target was met."""
        return self.measured >= self.limit if self.least else self.measured <= self.limit

    @property
    def verdict(self) -> str:
        """``ok`` or ``short``."""
        return "ok" if self.kept else "short"

    @property
    def asked(self) -> str:
        """The limit in words."""
        return f"{'≥' if self.least else '≤'} {number(self.limit)} {self.unit}"


@dataclass(slots=True)
class Section:
    """
    One question and its answer.

    Args:
        key: Its name on the command line, in the JSON and in the name of its plot.
        question: What is measured.
        figures: The results; the first unit is that of the plot.
        targets: Its rows in the table of targets.
        left_out: What could not be measured, and why.
    """

    key: str
    question: str
    figures: list[Figure] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def value(self, name: str) -> float | None:
        """Return the value of the figure with this name, if it was measured."""
        return next((figure.value for figure in self.figures if figure.name == name), None)

    def compare(
        self, case: str, other: str, limit: float, *, ours: str = OURS, faster: bool = False, floor: str = ""
    ) -> None:
        """
        Add a target that is a ratio of two figures, unless one of them is missing.

        Args:
            case: What is compared, in words.
            other: The figure to compare with.
            limit: The target ratio.
            ours: Our figure.
            faster: Whether *limit* is how many times faster ours must be, rather than how much it may take.
            floor: The figure of raw sockets that do the same as ours.
        """
        mine, theirs = self.value(ours), self.value(other)
        if mine and theirs:
            ratio, lowest = mine / theirs, (self.value(floor) or 0.0) / theirs
            if faster:
                ratio, lowest = 1 / ratio, lowest and 1 / lowest
            unit = "× faster" if faster else "×"
            self.targets.append(Target(case, ratio, limit, unit, least=faster, floor=lowest or None))


def environment() -> dict[str, str]:
    """Return the versions with which the figures were measured."""
    found = {"Python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def number(value: float) -> str:
    """Return a number with three significant digits."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def lines(section: Section) -> Iterable[str]:
    """Yield the lines of a section as they are printed."""
    yield f"\n{section.key}: {section.question}"
    fastest = section.figures[0].value if section.figures else 0.0
    for figure in section.figures:
        ratio = figure.value / fastest if fastest and figure.unit == section.figures[0].unit else 0.0
        more = "  ".join(f"{name} {number(value)}" for name, value in figure.more.items())
        shown = f"{ratio:7.2f} ×" if ratio else " " * 9
        yield f"  {figure.name:<44} {number(figure.value):>9} {figure.unit:<9} {shown}  {more}".rstrip()
    for target in section.targets:
        measured = f"{number(target.measured)} {target.unit}"
        floor = "" if target.floor is None else f", floor {number(target.floor)}"
        yield f"  {target.verdict:<5} {target.case:<60} {measured:>18}  asked {target.asked}{floor}"
    for each in section.left_out:
        yield f"  left out: {each}"


def dump(sections: Sequence[Section], command: str, path: Path) -> None:
    """Write a run as JSON."""
    run = {"command": command, "environment": environment(), "sections": [asdict(section) for section in sections]}
    path.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> tuple[list[Section], dict[str, Any]]:
    """Return the sections of a run, and its other data."""
    run = json.loads(path.read_text(encoding="utf-8"))
    return [_section(each) for each in run.pop("sections")], run


def _section(stored: dict[str, Any]) -> Section:
    figures = [Figure(**figure) for figure in stored.pop("figures")]
    targets = [Target(**target) for target in stored.pop("targets")]
    return Section(**stored, figures=figures, targets=targets)
