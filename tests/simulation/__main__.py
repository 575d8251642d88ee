"""
Run many schedules and print the figures.

    python -m tests.simulation --profile everything --schedules 1000 --seed 1
    python -m tests.simulation --profile everything --seed 42 --trace
    python -m tests.simulation --mutants
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from time import perf_counter

from .database import CLAIMED, COMPARED, UNFENCED
from .mutants import MUTANTS, hunt, score
from .oracles import Figures
from .profiles import PROFILES
from .schedule import Outcome, run

HEADS = ("profile", "schedules", "acquisitions", "overlaps", "token errors", "other violations")
HEADS += ("lost, no fence", "lost, compared", "lost, claimed", "one round trip")


def main() -> int:
    """Return 1 if an oracle objected where the profile does not tolerate it, else 0."""
    options = parse()
    if options.mutants:
        kills = [hunt(mutant) for mutant in MUTANTS]
        print(score(kills))
        return int(any(kill.oracle is None for kill in kills))
    if options.trace:
        outcome = run(PROFILES[options.profile], options.seed, traced=True)
        print("\n".join(outcome.trace))
        print(*outcome.violations, sep="\n")
        return int(bool(outcome.failures))
    print("| " + " | ".join(HEADS) + " |\n|" + " --- |" * len(HEADS), flush=True)
    began, failures = perf_counter(), []
    for name in PROFILES if options.profile == "all" else [options.profile]:
        figures, failed = simulate(name, options.schedules, options.seed, options.jobs)
        print(line(name, figures), flush=True)
        failures += failed
    print(f"\n{perf_counter() - began:.0f} s, {len(failures)} schedules failed")
    for outcome in failures[:3]:
        print("\n" + str(outcome))
    return int(bool(failures))


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--profile", default="all", choices=["all", *PROFILES])
    parser.add_argument("--schedules", type=int, default=100, help="how many of each profile")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first schedule; the next ones count up")
    parser.add_argument("--jobs", type=int, default=1, help="processes to use")
    parser.add_argument("--trace", action="store_true", help="run one schedule and print all that happens in it")
    parser.add_argument("--mutants", action="store_true", help="run the wrong protocols and print the score")
    options = parser.parse_args()
    if options.trace and options.profile == "all":
        parser.error("--trace needs the --profile of the schedule.")
    return options


def simulate(name: str, schedules: int, seed: int, jobs: int) -> tuple[Figures, list[Outcome]]:
    """Run schedules of one profile; returns their figures and those that failed."""
    figures, failures = Figures(), []
    seeds = range(seed, seed + schedules)
    with ProcessPoolExecutor(jobs) as pool:
        each = partial(run, PROFILES[name])
        outcomes = pool.map(each, seeds, chunksize=20) if jobs > 1 else map(each, seeds)
        for outcome in islice(outcomes, schedules):
            figures.add(outcome.figures)
            if outcome.failures:
                failures.append(outcome)
    return figures, failures


def line(name: str, figures: Figures) -> str:
    """Return a profile's line of the table."""
    found = dict(figures.violations)
    overlaps, tokens = found.pop("overlap", 0), found.pop("token", 0)
    lost = [f"{figures.lost[guard]:,} of {figures.committed[guard]:,}" for guard in (UNFENCED, COMPARED, CLAIMED)]
    others = ", ".join(f"{number} {oracle}" for oracle, number in found.items()) or "0"
    share = f"{100 * figures.one_round / max(figures.acquisitions, 1):.1f} %"
    cells = [name, f"{figures.schedules:,}", f"{figures.acquisitions:,}", overlaps, tokens, others, *lost, share]
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    sys.exit(main())
