"""Draw the share of lost increments, as a bar chart that reads well on a light and on a dark page."""

from collections.abc import Mapping

from .database import CLAIMED, COMPARED, UNFENCED
from .oracles import Figures

NAMES = {UNFENCED: "no fence", COMPARED: "compared when writing", CLAIMED: "claimed before reading"}
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2328 } rect { fill: #9aa4b2 }
@media (prefers-color-scheme: dark) { text { fill: #e6e6e6 } rect { fill: #6b7686 } }"""


def draw_lost(found: Mapping[str, Figures]) -> str:
    """Return a chart of how many of a thousand increments were lost, for the profiles in which any were."""
    bars = [
        (f"{name}, {NAMES[guard]}", 1000 * figures.lost[guard] / max(figures.committed[guard], 1))
        for name, figures in found.items()
        if any(figures.lost.values())
        for guard in NAMES
    ]
    longest = max((lost for _, lost in bars), default=0.0) or 1.0
    drawn = [
        f'<text x="292" y="{46 + 26 * place + 14}" text-anchor="end">{name}</text>'
        f'<rect x="300" y="{46 + 26 * place}" width="{370 * lost / longest + 1:.1f}" height="18" rx="2"/>'
        f'<text x="{307 + 370 * lost / longest:.1f}" y="{46 + 26 * place + 14}">{lost:.2f}</text>'
        for place, (name, lost) in enumerate(bars)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {54 + 26 * len(bars)}" role="img">',
            f"<style>{STYLE}</style>",
            '<text x="8" y="22">Increments lost of a thousand (less is better)</text>',
            *drawn,
            "</svg>\n",
        ]
    )
