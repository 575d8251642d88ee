"""Run the benchmark: ``python -m tests.lab.benchmarks``, or ``tox run -e bench``."""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from django_redlock.testing import start_servers

from . import against, faults, inventory, kinds, locking, processes, publishing, serial, waiting
from .bench import Bench, set_up
from .report import TABLES, Section, lines, render

Group = Callable[[Bench], Iterator[Section]]

GROUPS: dict[str, Group] = {
    "free": locking.free,
    "distance": locking.distance,
    "asyncio": locking.event_loop,
    "many": locking.many,
    "faults": faults.run,
    "waiting": waiting.run,
    "processes": processes.run,
    "inventory": inventory.run,
    "publishing": publishing.run,
    "serial": serial.run,
    "kinds": kinds.run,
}
"""What ``--only`` can name, in the order in which it is run."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions: less than five minutes")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"groups of rows, from {', '.join(GROUPS)}")
    parser.add_argument(
        "--against", type=Path, metavar="WHEEL", help="measure only how this checkout compares with another version"
    )
    parser.add_argument("--cases", default="", help="with --against: only the cases whose names begin so")
    parser.add_argument("--write-tables", action="store_true", help="put what was measured into tables.md")
    options = parser.parse_args(argv)
    unknown = set(options.only.split(",")) - GROUPS.keys()
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} is not one of {', '.join(GROUPS)}")
    return options


def measure(options: argparse.Namespace) -> list[Section]:
    """Run the groups and print each section when it is ready; a group that fails does not stop the others."""
    sections = []
    chosen = {name: GROUPS[name] for name in options.only.split(",")}
    if options.against:
        chosen = {"against": partial(against.run, wheel=options.against, cases=options.cases)}
    for name, run in chosen.items():
        for section in _group(name, run, options.quick):
            print("\n".join(lines(section)), flush=True)
            sections.append(section)
    return sections


def _group(name: str, run: Group, quick: bool) -> Iterator[Section]:
    try:
        with start_servers(5) as servers:
            yield from run(Bench(servers, quick))
    except Exception as error:
        traceback.print_exc()
        yield Section(name, "failed", left_out=[f"the rest of {name!r}: {type(error).__name__}: {error}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status reports whether all of it ran, not how fast it was."""
    options, began = arguments(argv), time.monotonic()
    set_up()
    sections = measure(options)
    asked = [figure.kept for section in sections for figure in section.figures if figure.kept is not None]
    print(f"\n{sum(asked)} of {len(asked)} targets kept, in {time.monotonic() - began:.0f} s.")
    if options.write_tables:
        TABLES.write_text(render(TABLES.read_text("utf-8"), sections), "utf-8")
    return int(any(section.question == "failed" for section in sections))


if __name__ == "__main__":
    sys.exit(main())
