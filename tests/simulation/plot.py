"""Draw the share of lost increments."""

from collections.abc import Mapping

from tests.lab.benchmarks.plots import draw
from tests.lab.benchmarks.report import Figure, Section

from .database import CLAIMED, COMPARED, UNFENCED
from .oracles import Figures

NAMES = {UNFENCED: "no fence", COMPARED: "compared when writing", CLAIMED: "claimed before reading"}


def draw_lost(found: Mapping[str, Figures]) -> str:
    """Return a chart of how many of a thousand increments were lost, for the profiles in which any were."""
    bars = [
        Figure(f"{name}, {NAMES[guard]}", 1000 * figures.lost[guard] / max(figures.committed[guard], 1), "")
        for name, figures in found.items()
        if any(figures.lost.values())
        for guard in NAMES
    ]
    return draw(Section("lost", "Increments lost of a thousand", bars or [Figure("nothing was lost", 0.0, "")]))
