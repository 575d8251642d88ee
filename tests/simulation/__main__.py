"""The simulation of locks: see :mod:`tests.machine.runner`."""

import sys
from collections import Counter

from tests.machine.runner import Simulation

from .assumptions import ASSUMPTIONS, need
from .database import GUARDS
from .mutants import MUTANTS, hunt
from .profiles import PROFILES
from .schedule import run

COLUMNS = ["acquisitions", "overlaps", "token errors", "other violations"]
COLUMNS += [*(f"lost, {guard}" for guard in GUARDS), "one round trip"]


def cells(figures: Counter[str], violations: Counter[str]) -> list[object]:
    overlaps, tokens = violations.pop("overlap", 0), violations.pop("token", 0)
    lost = [f"{figures[f'lost, {guard}']:,} of {figures[f'committed, {guard}']:,}" for guard in GUARDS]
    others = ", ".join(f"{number} {oracle}" for oracle, number in violations.items()) or "0"
    share = f"{100 * figures['one round'] / max(figures['acquisitions'], 1):.1f} %"
    return [f"{figures['acquisitions']:,}", overlaps, tokens, others, *lost, share]


HUNTS = {
    "mutants": ("run the wrong protocols and print the score", lambda: [hunt(mutant) for mutant in MUTANTS]),
    "assumptions": ("break each assumption and print what went wrong", lambda: [need(each) for each in ASSUMPTIONS]),
}

if __name__ == "__main__":
    sys.exit(Simulation("tests.simulation", 200_000, PROFILES, run, HUNTS, COLUMNS, cells).main())
