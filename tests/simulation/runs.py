"""Run schedules on all processors, and add up the results."""

import gc
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Self

from tests.lab.tables import heads, row

from .database import CLAIMED, COMPARED, UNFENCED
from .oracles import Figures
from .profiles import Profile
from .schedule import Outcome, run

COLUMNS = ("profile", "schedules", "acquisitions", "overlaps", "token errors", "other violations")
COLUMNS += ("lost, no fence", "lost, compared", "lost, claimed", "one round trip")
HEADS = heads(COLUMNS)

Run = tuple[Figures, list[Outcome]]

CHUNK = 25  # schedules that a process is given at a time
FEW = 5  # schedules after which to collect garbage: while there is little, it is still in the processor's cache


class Runs:
    """Processes that run schedules; to be used in a ``with`` block."""

    def __init__(self, jobs: int) -> None:
        # Not forked: the calling process may have threads.
        self._pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=begin, initargs=(sys.path,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, profile: Profile, seeds: range) -> Run:
        """Run a schedule for each seed; return the figures of all, and the failed ones."""
        chunks = [seeds[first : first + CHUNK] for first in range(0, len(seeds), CHUNK)]
        return add(self._pool.map(partial(one_after_the_other, profile), chunks))


def begin(path: list[str]) -> None:
    sys.path[:] = path
    gc.freeze()
    gc.disable()  # garbage of schedules is collected between them


def one_after_the_other(profile: Profile, seeds: Iterable[int]) -> Run:
    """Run a few schedules in this process."""
    figures, failed = Figures(), []
    for number, seed in enumerate(seeds):
        outcome = run(profile, seed)
        figures.add(outcome.figures)
        if outcome.failures:
            failed.append(outcome)
        if number % FEW == FEW - 1:
            gc.collect()
    return figures, failed


def add(runs: Iterable[Run]) -> Run:
    """Return the figures of several runs together, and the failures."""
    figures, failures = Figures(), []
    for more, failed in runs:
        figures.add(more)
        failures += failed
    return figures, failures


def line(name: str, figures: Figures) -> str:
    found = dict(figures.violations)
    overlaps, tokens = found.pop("overlap", 0), found.pop("token", 0)
    lost = [f"{figures.lost[guard]:,} of {figures.committed[guard]:,}" for guard in (UNFENCED, COMPARED, CLAIMED)]
    others = ", ".join(f"{number} {oracle}" for oracle, number in found.items()) or "0"
    share = f"{100 * figures.one_round / max(figures.acquisitions, 1):.1f} %"
    cells = [name, f"{figures.schedules:,}", f"{figures.acquisitions:,}", overlaps, tokens, others, *lost, share]
    return row(cells)
