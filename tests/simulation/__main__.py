"""
Run many schedules and print the figures.

    python -m tests.simulation --schedules 200000
    python -m tests.simulation --profile everything --schedules 1000 --seed 1
    python -m tests.simulation --profile everything --seed 42 --trace
    python -m tests.simulation --mutants
    python -m tests.simulation --assumptions
"""

import argparse
import gc
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import ceil
from secrets import randbelow
from time import perf_counter

from tests.lab.tables import heads, row

from .assumptions import ASSUMPTIONS, need
from .database import GUARDS
from .mutants import MUTANTS, hunt
from .mutation import score
from .profiles import PROFILES, Profile
from .schedule import Outcome, run

COLUMNS = ["profile", "schedules", "acquisitions", "overlaps", "token errors", "other violations"]
COLUMNS += [*(f"lost, {guard}" for guard in GUARDS), "one round trip"]

PART = 25  # schedules that a process runs at a time
FEW = 5  # schedules after which to collect garbage: while there is little, it is still in the processor's cache


def main() -> int:
    """Return 1 if a check fails, else 0."""
    options = parse()
    if options.mutants or options.assumptions:
        found = [hunt(mutant) for mutant in MUTANTS] if options.mutants else [need(each) for each in ASSUMPTIONS]
        print(score(found))
        return int(any(each.what is None for each in found))
    if options.trace:
        outcome = run(PROFILES[options.profile], options.seed, traced=True)
        print("\n".join(outcome.trace))
        print(*outcome.violations, sep="\n")
        return int(bool(outcome.failures))
    return many(options)


def many(options: argparse.Namespace) -> int:
    """Run schedules of the selected profiles, and print a line for each."""
    names = list(PROFILES) if options.profile == "all" else [options.profile]
    shares = sum(PROFILES[name].share for name in names)
    print(f"seed {options.seed}: {len(names)} profiles, {options.jobs} processes\n\n{heads(COLUMNS)}", flush=True)
    began, count = perf_counter(), 0
    failures: list[Outcome] = []
    with ProcessPoolExecutor(options.jobs, initializer=gc.disable) as pool:
        for name in names:
            number = ceil(options.schedules * PROFILES[name].share / shares)
            parts = [range(first, min(first + PART, number)) for first in range(0, number, PART)]
            figures: Counter[str] = Counter()
            violations: Counter[str] = Counter()
            for some, wrong, failed in pool.map(partial(part, PROFILES[name], options.seed), parts):
                figures += some
                violations += wrong
                failures += failed
            print(line(name, number, figures, violations), flush=True)
            count += number
    print(f"\n{count:,} schedules in {perf_counter() - began:.0f} s, {len(failures)} failed")
    for outcome in failures[:3]:
        print("\n" + str(outcome))
    return int(bool(failures))


def part(profile: Profile, seed: int, numbers: range) -> tuple[Counter[str], Counter[str], list[Outcome]]:
    """Run some schedules; return what they counted, the violations of each oracle, and the failed schedules."""
    figures: Counter[str] = Counter()
    violations: Counter[str] = Counter()
    failed = []
    for number in numbers:
        outcome = run(profile, seed + number)
        figures += outcome.figures
        violations.update(oracle for oracle, _ in outcome.violations)
        if outcome.failures:
            failed.append(outcome)
        if number % FEW == FEW - 1:
            gc.collect()
    return figures, violations, failed


def line(name: str, schedules: int, figures: Counter[str], violations: Counter[str]) -> str:
    overlaps, tokens = violations.pop("overlap", 0), violations.pop("token", 0)
    lost = [f"{figures[f'lost, {guard}']:,} of {figures[f'committed, {guard}']:,}" for guard in GUARDS]
    others = ", ".join(f"{number} {oracle}" for oracle, number in violations.items()) or "0"
    share = f"{100 * figures['one round'] / max(figures['acquisitions'], 1):.1f} %"
    return row((name, f"{schedules:,}", f"{figures['acquisitions']:,}", overlaps, tokens, others, *lost, share))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--profile", default="all", choices=["all", *PROFILES])
    parser.add_argument("--schedules", type=int, default=200_000, help="how many in all")
    parser.add_argument("--seed", type=int, help="that of the first schedule; by default it is new")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes to use")
    parser.add_argument("--trace", action="store_true", help="run one schedule and print all its events")
    parser.add_argument("--mutants", action="store_true", help="run the wrong protocols and print the score")
    parser.add_argument("--assumptions", action="store_true", help="break each assumption and print what went wrong")
    options = parser.parse_args()
    if options.trace and (options.profile == "all" or options.seed is None):
        parser.error("--trace needs the --profile and the --seed of the schedule.")
    if options.seed is None:
        options.seed = randbelow(10**9)
    return options


if __name__ == "__main__":
    sys.exit(main())
