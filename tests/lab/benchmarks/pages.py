"""
Put the figures of one run into ``docs/trust/benchmarks.md`` and ``docs/reference/benchmark-tables.md``.

The text of the pages is fixed, except between ``<!-- figures: KEY -->`` and ``<!-- end -->``: the tables of the section
with that key. ``summary`` and ``environment`` are keys as well. The figures come from ``docs/trust/benchmarks.json``,
which is committed with the pages. A test compares the two.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .report import Section, number

DOCS = Path(__file__).parents[3] / "docs"
PAGES = (DOCS / "trust" / "benchmarks.md", DOCS / "reference" / "benchmark-tables.md")
STORED, IMAGES = DOCS / "trust" / "benchmarks.json", DOCS / "images"
MARKED = re.compile(r"(<!-- figures: (?P<key>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(page: str, sections: list[Section], run: dict[str, Any]) -> str:
    """Return the page with the figures of a run in it."""
    known = {section.key: section for section in sections}

    def fill(match: re.Match[str]) -> str:
        return match[1] + "\n".join(_table(match["key"], known, run)) + "\n" + match[3]

    return MARKED.sub(fill, page)


def _table(key: str, known: dict[str, Section], run: dict[str, Any]) -> Iterator[str]:
    if key == "summary":
        yield from _targets(list(known.values()))
    elif key == "environment":
        yield f"`{run['command']}` with " + ", ".join(f"{name} {found}" for name, found in run["environment"].items())
    elif key in known:
        yield from _figures(known[key])
    else:
        yield "*(not measured in this run)*"


def _figures(section: Section) -> Iterator[str]:
    extra = list(dict.fromkeys(name for figure in section.figures for name in figure.more))
    if section.figures:
        yield "| | | × |" + "".join(f" {name} |" for name in extra)
        yield "| --- | ---: | ---: |" + " ---: |" * len(extra)
    for figure in section.figures:
        first = section.figures[0]
        ratio = number(figure.value / first.value) if first.value and figure.unit == first.unit else ""
        more = "".join(f"{number(figure.more[name]) if name in figure.more else ''} | " for name in extra)
        yield f"| {figure.name} | {number(figure.value)} {figure.unit} | {ratio} | {more}".rstrip()
    if (IMAGES / f"bench-{section.key}.svg").exists():
        yield f"\n![{section.question}](../images/bench-{section.key}.svg)"
    for each in section.left_out:
        yield f"\nLeft out: {each}"


def _targets(sections: list[Section]) -> Iterator[str]:
    yield "| row | what | asked | floor | measured | |"
    yield "| --- | --- | ---: | ---: | ---: | --- |"
    for section in sections:
        for target in section.targets:
            measured = f"{number(target.measured)} {target.unit}"
            floor = "" if target.floor is None else number(target.floor)
            yield f"| `{section.key}` | {target.case} | {target.asked} | {floor} | {measured} | {target.verdict} |"
