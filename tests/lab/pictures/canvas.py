"""Draw boxes, lines, arrows and texts as SVG, in the colours of a theme."""

from dataclasses import dataclass, field
from html import escape

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "soft": "#59636e",
    "line": "#8c959f",
    "panel": "#f3f5f7",
    "good": "#1a7f37",
    "good-fill": "#d3f0da",
    "bad": "#c1121f",
    "bad-fill": "#fbdcdc",
    "wait": "#9a6700",
    "wait-fill": "#fbefc6",
    "main": "#0b57b0",
    "main-fill": "#dbe9fb",
}
DARK = {
    "paper": "#131416",
    "ink": "#e6edf3",
    "soft": "#a3adb8",
    "line": "#6e7681",
    "panel": "#1e2126",
    "good": "#56d36f",
    "good-fill": "#12381d",
    "bad": "#ff7b7b",
    "bad-fill": "#4a1a1c",
    "wait": "#e3b341",
    "wait-fill": "#3d2f0c",
    "main": "#79b8ff",
    "main-fill": "#112f52",
}
THEMES = {"light": LIGHT, "dark": DARK}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
SIZE = 14  # pixels of a usual text


@dataclass
class Canvas:
    """One picture."""

    width: int
    height: int
    title: str
    colours: dict[str, str]
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str = "panel", edge: str = "line") -> None:
        """Draw a box with round corners."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            f'fill="{self.colours[fill]}" stroke="{self.colours[edge]}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        colour: str = "ink",
        anchor: str = "start",
        size: int = SIZE,
        weight: int = 400,
    ) -> None:
        """Write lines of text, the first with its baseline at *y*."""
        for number, line in enumerate(words.split("\n")):
            self.parts.append(
                f'<text x="{x:g}" y="{y + number * size * 1.3:g}" fill="{self.colours[colour]}" '
                f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}">{escape(line, quote=False)}</text>'
            )

    def label(self, x: float, y: float, width: float, height: float, words: str, colour: str = "main") -> None:
        """Draw a box with its text in the middle; *colour* also has a fill."""
        self.box(x, y, width, height, f"{colour}-fill", colour)
        lines = words.count("\n")
        self.text(x + width / 2, y + height / 2 + 5 - lines * SIZE * 0.65, words, anchor="middle")

    def line(self, points: list[tuple[float, float]], colour: str = "line", dashed: bool = False) -> None:
        """Draw a line through some points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{self.colours[colour]}" stroke-width="1.6"{dash}/>'
        )

    def arrow(self, points: list[tuple[float, float]], colour: str = "ink", dashed: bool = False) -> None:
        """Draw a line with a head at its last point."""
        self.line(points, colour, dashed)
        (before_x, before_y), (x, y) = points[-2:]
        length = ((x - before_x) ** 2 + (y - before_y) ** 2) ** 0.5
        along, across = ((x - before_x) / length, (y - before_y) / length), 4.0
        back = (x - 9 * along[0], y - 9 * along[1])
        corners = [
            (x, y),
            (back[0] - across * along[1], back[1] + across * along[0]),
            (back[0] + across * along[1], back[1] - across * along[0]),
        ]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
        self.parts.append(f'<polygon points="{path}" fill="{self.colours[colour]}"/>')

    def cross(self, x: float, y: float, colour: str = "bad") -> None:
        """Draw an X."""
        self.line([(x - 6, y - 6), (x + 6, y + 6)], colour)
        self.line([(x - 6, y + 6), (x + 6, y - 6)], colour)

    def circle(self, x: float, y: float, radius: float, colour: str, words: str = "") -> None:
        """Draw a circle with a short text in it."""
        self.parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{self.colours[f"{colour}-fill"]}" '
            f'stroke="{self.colours[colour]}" stroke-width="1.6"/>'
        )
        self.text(x, y + 4, words, anchor="middle", size=12)

    def svg(self) -> str:
        """Return the picture as the text of a file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" font-family="{FONT}">'
        )
        paper = f'<rect width="{self.width}" height="{self.height}" fill="{self.colours["paper"]}"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", paper, *self.parts, "</svg>"]) + "\n"
