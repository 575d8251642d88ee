"""
Run many schedules of a simulation, its wrong protocols, or one schedule with all its events, from the command line.

    python -m tests.simulation --schedules 200000
    python -m tests.simulation --profile everything --seed 42 --trace
    python -m tests.slots --mutants
"""

import argparse
import gc
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from secrets import randbelow
from time import perf_counter
from typing import Any

from tests.lab.tables import heads, row

from .mutation import Kill, score

PART = 25  # schedules that a process runs at a time
FEW = 5  # schedules after which to collect garbage: while there is little, it is still in the processor's cache
EXCERPT = 80  # lines of the trace to show before the first violation
SHOWN = 3  # failed schedules to show

Violation = tuple[str, str]
"""The name of an oracle, and what it objects to."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one schedule led to."""

    module: str
    profile: Any
    seed: int
    violations: list[Violation]
    trace: list[str]
    figures: Counter[str] = field(default_factory=Counter)

    @property
    def failures(self) -> list[Violation]:
        """Violations that the profile's assumptions do not excuse."""
        return [violation for violation in self.violations if violation[0] not in self.profile.tolerated]

    def __str__(self) -> str:
        name = self.profile.name
        lines = [f"seed {self.seed}, profile {name}", *(f"{oracle}: {what}" for oracle, what in self.violations)]
        lines.append(f"all of it: python -m {self.module} --profile '{name}' --seed {self.seed} --trace")
        first = next((place for place, line in enumerate(self.trace) if " ORACLE " in line), len(self.trace))
        return "\n".join([*lines, *self.trace[max(0, first - EXCERPT) : first + 1]])


@dataclass(frozen=True, slots=True)
class Simulation:
    """
    What the command line runs.

    Attributes:
        module: Its name.
        schedules: How many to run by default.
        profiles: Its profiles, by name.
        play: Runs one schedule: a profile, a seed, and whether with its trace.
        hunts: Further options of the command line, with their help: what each of them looks for, and must find.
        columns: The heads of further columns of figures.
        cells: Returns these from the figures and the violations of each oracle.
    """

    module: str
    schedules: int
    profiles: Mapping[str, Any]
    play: Callable[[Any, int, bool], Outcome]
    hunts: Mapping[str, tuple[str, Callable[[], list[Kill]]]]
    columns: Sequence[str] = ()
    cells: Callable[[Counter[str], Counter[str]], Sequence[object]] = lambda figures, violations: ()

    def main(self) -> int:
        """Return 1 if a check fails, else 0."""
        options = self._parse()
        for name, (_, search) in self.hunts.items():
            if getattr(options, name):
                found = search()
                print(score(found))
                return int(any(each.what is None for each in found))
        if options.trace:
            outcome = self.play(self.profiles[options.profile], options.seed, True)
            print("\n".join(outcome.trace))
            print(*outcome.violations, sep="\n")
            return int(bool(outcome.failures))
        return self._many(options)

    def _many(self, options: argparse.Namespace) -> int:
        """Run schedules of the selected profiles, and print a line for each."""
        names = list(self.profiles) if options.profile == "all" else [options.profile]
        shares = sum(self.profiles[name].share for name in names)
        print(f"seed {options.seed}: {len(names)} profiles, {options.jobs} processes\n", flush=True)
        print(heads(["profile", "schedules", *self.columns, "failed"]), flush=True)
        began, count = perf_counter(), 0
        failures: list[Outcome] = []
        with ProcessPoolExecutor(options.jobs, initializer=gc.disable) as pool:
            for name in names:
                number = ceil(options.schedules * self.profiles[name].share / shares)
                parts = [range(first, min(first + PART, number)) for first in range(0, number, PART)]
                figures: Counter[str] = Counter()
                violations: Counter[str] = Counter()
                failed: list[Outcome] = []
                for some, wrong, bad in pool.map(partial(part, self.play, self.profiles[name], options.seed), parts):
                    figures += some
                    violations += wrong
                    failed += bad
                print(row((name, f"{number:,}", *self.cells(figures, violations), len(failed))), flush=True)
                count += number
                failures += failed
        print(f"\n{count:,} schedules in {perf_counter() - began:.0f} s, {len(failures)} failed")
        for outcome in failures[:SHOWN]:
            print("\n" + str(outcome))
        return int(bool(failures))

    def _parse(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=f"python -m {self.module}", description=(__doc__ or "").strip())
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.add_argument("--profile", default="all", choices=["all", *self.profiles])
        parser.add_argument("--schedules", type=int, default=self.schedules, help="how many in all")
        parser.add_argument("--seed", type=int, help="that of the first schedule of each profile; by default it is new")
        parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes to use")
        parser.add_argument("--trace", action="store_true", help="run one schedule and print all its events")
        for name, (about, _) in self.hunts.items():
            parser.add_argument(f"--{name}", action="store_true", help=about)
        options = parser.parse_args()
        if options.trace and (options.profile == "all" or options.seed is None):
            parser.error("--trace needs the --profile and the --seed of the schedule.")
        if options.seed is None:
            options.seed = randbelow(10**9)
        return options


def part(
    play: Callable[[Any, int, bool], Outcome], profile: Any, seed: int, numbers: range
) -> tuple[Counter[str], Counter[str], list[Outcome]]:
    """Run some schedules; return what they counted, the violations of each oracle, and the failed schedules."""
    figures: Counter[str] = Counter()
    violations: Counter[str] = Counter()
    failed = []
    for number in numbers:
        outcome = play(profile, seed + number, False)
        figures += outcome.figures
        violations.update(oracle for oracle, _ in outcome.violations)
        if outcome.failures:  # run again with its trace
            failed.append(play(profile, seed + number, True))
        if number % FEW == FEW - 1:
            gc.collect()
    return figures, violations, failed
