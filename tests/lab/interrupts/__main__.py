"""Run the sweep; see the package's docstring."""

import argparse
import gc
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from django.conf import settings

if not settings.configured:
    settings.configure()

from django_redlock.testing import start_servers

from .reach import Reach
from .storm import Storm
from .sweep import KINDS, Sweep, make_manager, sweeps
from .trap import NEVER, Line, Trap


def main() -> None:
    """Sweep everything; exit with 1 at the first failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.interrupts", description=main.__doc__)
    parser.add_argument("--lines", action="store_true", help="interrupt before every line, too")
    parser.add_argument("--each-line", action="store_true", help="interrupt twice at each line, and not at all points")
    parser.add_argument("--twice", action="store_true", help="interrupt once more while the first is handled")
    parser.add_argument("--step", type=int, default=1, help="interrupt only at every STEP-th point")
    parser.add_argument("--first", type=int, default=0, help="begin at this point: runs side by side share the points")
    parser.add_argument("--nodes", choices=KINDS, action="append", help="all if not given")
    parser.add_argument("--signals", type=int, metavar="COUNT", help="send COUNT signals at random, instead")
    parser.add_argument("--scenario", help="run only scenarios whose names contain this")
    parser.add_argument(
        "--uncovered", action="store_true", help="list the lines of the engine that are not interrupted, instead"
    )
    chosen = parser.parse_args()
    if chosen.uncovered:
        sys.exit(uncovered(chosen))
    for kind in chosen.nodes or KINDS:
        with urls_of(kind) as urls:
            if chosen.signals:
                Storm(make_manager(kind, urls)).run(chosen.signals)
            else:
                sweep_over(kind, urls, chosen)


@contextmanager
def urls_of(kind: str) -> Iterator[list[str]]:
    """Return the addresses of the servers that a kind of node needs."""
    servers = start_servers(3) if kind == "servers" else None
    try:
        yield servers.urls if servers else []
    finally:
        if servers:
            servers.stop()


def chosen_sweeps(kind: str, urls: list[str], chosen: Namespace) -> Iterator[Sweep]:
    for sweep in sweeps(kind, urls, lines=chosen.lines, twice=chosen.twice):
        if not chosen.scenario or chosen.scenario in sweep.scenario.name:
            yield sweep
        sweep.close()


def sweep_over(kind: str, urls: list[str], chosen: Namespace) -> None:
    """Sweep one kind of node, and print a line for each scenario."""
    done: dict[bool, set[Line]] = {False: set(), True: set()}
    for sweep in chosen_sweeps(kind, urls, chosen):
        began = time.monotonic()
        sweep.count(Trap(NEVER))  # Python 3.12 shows opcodes from the second time on
        if chosen.each_line:
            sweep.run_lines(done[sweep.elsewhere])
        else:
            sweep.run(chosen.first, chosen.step)
        where = "another thread" if sweep.elsewhere else "the main thread"
        again = f", {sweep.again} of them twice" if chosen.twice else ""
        print(
            f"{kind:12} {sweep.scenario.name:32} {where:16} {sweep.points:6} interruptions{again}, "
            f"{len(sweep.slow)} left to the ttl, {time.monotonic() - began:.0f} s",
            *(sorted(set(sweep.slow)) if chosen.step == 1 else ()),
            sep="\n    ",
            flush=True,
        )
        gc.collect()
    if chosen.each_line:
        print(f"{kind}: {len(done[False] | done[True])} lines", flush=True)


def uncovered(chosen: Namespace) -> str | None:
    """Run all scenarios without interruptions; return what is neither interrupted nor excused."""
    reach = Reach()
    with reach.measured():
        for kind in chosen.nodes or KINDS:
            with urls_of(kind) as urls:
                for sweep in chosen_sweeps(kind, urls, chosen):
                    if not sweep.elsewhere:
                        reach.add(sweep)
    unexcused = reach.report()
    return "neither interrupted nor excused: " + ", ".join(unexcused) if unexcused else None


if __name__ == "__main__":
    main()
