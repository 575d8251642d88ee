"""
Draw a section as a bar chart: an SVG that reads well on a light and on a dark page.
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path

from .report import OURS, Figure, Section, number

WIDTH, LINE, TOP, NAMES = 760, 26, 46, 300  # pixels: of the image, a bar, the title, and the column of names
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600; font-size: 14px }
rect { fill: #9aa4b2 } .ours { fill: #0c7a53 }
@media (prefers-color-scheme: dark) { text { fill: #e6e6e6 } rect { fill: #6b7686 } .ours { fill: #35c28d } }"""


def draw(section: Section) -> str:
    """Return the chart of the figures that have the first figure's unit; shorter bars are better, except for ``/s``."""
    figures = [figure for figure in section.figures if figure.unit == section.figures[0].unit]
    height = TOP + LINE * len(figures) + 8
    body = "\n".join(_bars(figures))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<style>{STYLE}</style>\n"
        f'<text class="title" x="8" y="22">{escape(section.question)} ({escape(_direction(figures))})</text>\n'
        f"{body}\n</svg>\n"
    )


def _direction(figures: list[Figure]) -> str:
    unit = figures[0].unit
    return f"{unit}, more is better" if unit == "/s" else f"{unit}, less is better".removeprefix(", ")


def _bars(figures: list[Figure]) -> Iterator[str]:
    longest = max(figure.value for figure in figures) or 1.0
    for place, figure in enumerate(figures):
        y, length = TOP + LINE * place, max(1.0, figure.value / longest * (WIDTH - NAMES - 90))
        mark = ' class="ours"' if _is_ours(figure) else ""
        yield f'<text x="{NAMES - 8}" y="{y + 14}" text-anchor="end">{escape(figure.name)}</text>'
        yield f'<rect{mark} x="{NAMES}" y="{y}" width="{length:.1f}" height="{LINE - 8}" rx="2"/>'
        yield f'<text x="{NAMES + length + 6:.1f}" y="{y + 14}">{number(figure.value)}</text>'


def _is_ours(figure: Figure) -> bool:
    return figure.name.startswith((OURS, "@singleton_task"))


def draw_all(sections: list[Section], folder: Path) -> list[Path]:
    """Write one chart for each section that compares something; return the files."""
    written = []
    for section in sections:
        if len([figure for figure in section.figures if figure.unit == section.figures[0].unit]) > 1:
            written.append(folder / f"bench-{section.key}.svg")
            written[-1].write_text(draw(section), encoding="utf-8")
    return written
