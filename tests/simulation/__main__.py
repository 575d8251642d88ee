"""
Run many schedules and print the figures.

    python -m tests.simulation --schedules 200000
    python -m tests.simulation --profile everything --schedules 1000 --seed 1
    python -m tests.simulation --profile everything --seed 42 --trace
    python -m tests.simulation --mutants
    python -m tests.simulation --assumptions
    python -m tests.simulation --exhaustive
    python -m tests.simulation --simultaneous --schedules 10000
"""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from math import ceil
from secrets import randbelow
from time import perf_counter

from .assumptions import ASSUMPTIONS, need, shown
from .exhaustive import table
from .mutants import MUTANTS, hunt
from .mutation import score
from .profiles import PROFILES
from .runs import HEADS, Runs, line
from .scenarios import simultaneous
from .schedule import Outcome, run


def main() -> int:
    """Return 1 if a check fails, else 0."""
    options = parse()
    if options.mutants:
        kills = [hunt(mutant) for mutant in MUTANTS]
        print(score(kills))
        return int(any(kill.what is None for kill in kills))
    if options.assumptions:
        needs = [need(assumption) for assumption in ASSUMPTIONS]
        print(shown(needs))
        return int(any(found.what is None for found in needs))
    if options.exhaustive:
        print(table())
        return 0
    if options.simultaneous:
        return race(options)
    if options.trace:
        outcome = run(PROFILES[options.profile], options.seed, traced=True)
        print("\n".join(outcome.trace))
        print(*outcome.violations, sep="\n")
        return int(bool(outcome.failures))
    return many(options)


def race(options: argparse.Namespace) -> int:
    """Let callers try to take a free lock at the same moment, again and again, and print how often nobody won."""
    seeds = range(options.seed, options.seed + options.schedules)
    print(f"seed {options.seed}", flush=True)
    with ProcessPoolExecutor(options.jobs) as pool:
        found = pool.map(simultaneous, seeds, chunksize=50)
        wrong = [(seed, violations) for seed, violations in zip(seeds, found, strict=True) if violations]
    print(f"{len(seeds):,} rounds of simultaneous callers, {len(wrong)} failed", *wrong[:3], sep="\n")
    return int(bool(wrong))


def many(options: argparse.Namespace) -> int:
    """Run schedules of the selected profiles, and print a line for each."""
    names = list(PROFILES) if options.profile == "all" else [options.profile]
    shares = sum(PROFILES[name].share for name in names)
    numbers = {name: ceil(options.schedules * PROFILES[name].share / shares) for name in names}
    print(f"seed {options.seed}: {len(names)} profiles, {options.jobs} processes\n")
    print(HEADS, flush=True)
    began = perf_counter()
    failures: list[Outcome] = []
    with Runs(options.jobs) as runs:
        for name in names:
            figures, failed = runs.run(PROFILES[name], range(options.seed, options.seed + numbers[name]))
            print(line(name, figures), flush=True)
            failures += failed
    took = perf_counter() - began
    print(f"\n{sum(numbers.values()):,} schedules in {took:.0f} s, {len(failures)} failed")
    for outcome in failures[:3]:
        print("\n" + str(outcome))
    return int(bool(failures))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--profile", default="all", choices=["all", *PROFILES])
    parser.add_argument(
        "--schedules", type=int, default=200_000, help="how many in all, the same number of each profile"
    )
    parser.add_argument(
        "--seed", type=int, help="seed of the first schedule; the next ones count up. By default it is new"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes to use")
    parser.add_argument("--trace", action="store_true", help="run one schedule and print all its events")
    parser.add_argument("--mutants", action="store_true", help="run the wrong protocols and print the score")
    parser.add_argument("--assumptions", action="store_true", help="break each assumption and print what went wrong")
    parser.add_argument("--exhaustive", action="store_true", help="search all schedules of the token for three nodes")
    parser.add_argument(
        "--simultaneous", action="store_true", help="count the rounds of simultaneous callers that nobody won"
    )
    options = parser.parse_args()
    if options.trace and (options.profile == "all" or options.seed is None):
        parser.error("--trace needs the --profile and the --seed of the schedule.")
    if options.seed is None:
        options.seed = randbelow(10**9)
    return options


if __name__ == "__main__":
    sys.exit(main())
