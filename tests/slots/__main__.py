"""
Run many schedules of singleton tasks and print their results.

    python -m tests.slots --schedules 20000
    python -m tests.slots --profile "rerun crowd" --seed 42 --trace
    python -m tests.slots --mutants
"""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from secrets import randbelow
from time import perf_counter

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
django.setup()

from tests.simulation.mutation import score  # noqa: E402

from .mutants import MUTANTS, hunt  # noqa: E402
from .profiles import PROFILES  # noqa: E402
from .schedule import Outcome, run  # noqa: E402

PART = 25  # schedules that a process runs at a time


def part(name: str, first: int, count: int) -> list[Outcome]:
    outcomes = (run(PROFILES[name], seed) for seed in range(first, first + count))
    return [outcome for outcome in outcomes if outcome.violations]


def many(options: argparse.Namespace) -> int:
    """Run schedules of the profiles that were asked for, and print a line for each; returns 1 if one failed."""
    names = list(PROFILES) if options.profile == "all" else [options.profile]
    each = -(-options.schedules // len(names))
    print(f"seed {options.seed}: {each:,} schedules of each of {len(names)} profiles", flush=True)
    began, failures = perf_counter(), []
    with ProcessPoolExecutor(options.jobs) as pool:
        for name in names:
            firsts = range(options.seed, options.seed + each, PART)
            parts = [pool.submit(part, name, first, min(PART, options.seed + each - first)) for first in firsts]
            failed = [outcome for done in parts for outcome in done.result()]
            print(f"{name:<22} {each - len(failed):>7,} of {each:,}", flush=True)
            failures += failed
    print(f"{each * len(names):,} schedules in {perf_counter() - began:.0f} s, {len(failures)} failed")
    for outcome in failures[:5]:
        print(f"\n{outcome}")
    return int(bool(failures))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slots", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--profile", default="all", choices=["all", *PROFILES])
    parser.add_argument("--schedules", type=int, default=20_000, help="how many in all, as many of each profile")
    parser.add_argument("--seed", type=int, help="seed of the first schedule of each profile; the next ones count up")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes to use")
    parser.add_argument("--trace", action="store_true", help="run one schedule and print all that happens in it")
    parser.add_argument("--mutants", action="store_true", help="run the wrong protocols and print the score")
    options = parser.parse_args()
    if options.mutants:
        kills = [hunt(mutant) for mutant in MUTANTS]
        print(score(kills))
        return int(any(kill.what is None for kill in kills))
    if options.seed is None:
        options.seed = randbelow(10**9)
    if options.trace:
        outcome = run(PROFILES[options.profile], options.seed, traced=True)
        print(outcome)
        return int(bool(outcome.violations))
    return many(options)


if __name__ == "__main__":
    sys.exit(main())
