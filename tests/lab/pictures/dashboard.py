"""The dashboard of docs/monitoring/grafana.json, with example values for an hour in which one node was down."""

import json
from pathlib import Path
from typing import Any

from .canvas import Canvas

SOURCE = Path(__file__).parents[3] / "docs" / "monitoring" / "grafana.json"
COLUMNS = 24  # of Grafana's grid


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(SOURCE.read_text())["panels"] if panel["type"] != "row"]


# Of each panel, by its place in the file: a number, bars as (name, from, to) of an outage, or lines as (name, values).
Series = list[tuple[str, str, list[float]]]
DOWN = (0.45, 0.62)  # of the hour, in which lock-2 did not answer
SILENT = (0.45, 0.66)  # and until its vote counted again
EXAMPLES: list[Any] = [
    "1",
    DOWN,
    SILENT,
    [
        ("held", "good", [14, 15, 14, 16, 15, 8, 7, 8, 14, 15, 16]),
        ("degraded", "wait", [0, 0, 0, 0, 0, 8, 8, 7, 0, 0, 0]),
    ],
    [
        ("acquired", "good", [9, 10, 11, 10, 9, 10, 10, 11, 10, 9, 10]),
        ("taken", "wait", [2, 2, 3, 2, 2, 2, 3, 2, 2, 3, 2]),
    ],
    [
        ("orders:*", "main", [2, 2, 3, 2, 2, 3, 3, 2, 2, 2, 2]),
        ("shop.import", "soft", [10, 10, 12, 10, 10, 10, 11, 10, 10, 10, 10]),
    ],
    [
        ("orders:*", "main", [20, 22, 20, 21, 20, 20, 23, 20, 20, 20, 20]),
        ("shop.import", "soft", [60, 70, 60, 60, 70, 60, 60, 60, 70, 60, 60]),
    ],
    [("none", "soft", [0] * 11)],
    [("default lock-2 down", "bad", [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0])],
]


def draw(canvas: Canvas) -> None:
    """Draw every panel of the file at its place, with its title."""
    across, down = (canvas.width - 16) / COLUMNS, (canvas.height - 16) / 30
    for panel, example in zip(panels(), EXAMPLES, strict=True):
        place = panel["gridPos"]
        x, y = 8 + place["x"] * across + 3, 8 + place["y"] * down + 3
        width, height = place["w"] * across - 6, place["h"] * down - 6
        canvas.box(x, y, width, height)
        canvas.text(x + 10, y + 19, panel["title"], size=12, weight=600)
        match example:
            case str():
                canvas.text(x + width / 2, y + height / 2 + 24, example, "good", "middle", 40, 700)
            case tuple():
                _bars(canvas, x, y, width, example)
            case list():
                _lines(canvas, (x, y, width, height), example)


def _bars(canvas: Canvas, x: float, y: float, width: float, outage: tuple[float, float]) -> None:
    for number in range(1, 4):
        top, left, room = y + 30 + (number - 1) * 24, x + 62, width - 74
        canvas.text(x + 12, top + 13, f"lock-{number}", "soft", size=12)
        canvas.box(left, top, room, 18, "good-fill", "good")
        if number == 2:
            canvas.box(left + room * outage[0], top, room * (outage[1] - outage[0]), 18, "bad-fill", "bad")


def _lines(canvas: Canvas, where: tuple[float, float, float, float], series: Series) -> None:
    x, y, width, height = where
    base, room, legend = y + height - 26, height - 60, x + 12
    most = max(1.0, *(value for _, _, values in series for value in values))
    canvas.line([(x + 12, base), (x + width - 12, base)])
    for name, colour, values in series:
        step = (width - 24) / (len(values) - 1)
        canvas.line([(x + 12 + n * step, base - value / most * room) for n, value in enumerate(values)], colour)
        canvas.text(legend, y + height - 9, f"— {name}", colour, size=12)
        legend += 30 + 7 * len(name)
