"""Run the benchmark: ``python -m tests.lab.benchmarks``, or ``tox run -e bench``."""

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from django_redlock.testing import start_servers

from . import against, kinds, locking, serial, waiting
from .bench import Bench, set_up
from .report import TABLES, Section, render, table

GROUPS: dict[str, Callable[[Bench], Iterator[Section]]] = {
    "free": locking.free,
    "distance": locking.distance,
    "rows": locking.rows,
    "faults": locking.faults,
    "waiting": waiting.run,
    "kinds": kinds.run,
    "serial": serial.run,
}


def main() -> int:
    """Run the benchmark; the exit status reports whether all of it ran, not how fast it was."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions: less than five minutes")
    parser.add_argument("--only", nargs="+", default=[*GROUPS], choices=[*GROUPS], help="groups of rows")
    parser.add_argument(
        "--against", type=Path, metavar="WHEEL", help="measure only how this checkout compares with another version"
    )
    parser.add_argument("--cases", default="", help="with --against: only the cases whose names begin so")
    parser.add_argument("--write-tables", action="store_true", help="put what was measured into tables.md")
    options = parser.parse_args()
    set_up()
    chosen = {name: GROUPS[name] for name in options.only}
    if options.against:
        chosen = {"against": partial(against.run, wheel=options.against, cases=options.cases)}
    sections, failed = [], False
    for run in chosen.values():
        try:
            with start_servers(5) as servers:
                for section in run(Bench(servers, options.quick)):
                    print(f"\n{section.key}: {section.question}\n", *table(section), sep="\n", flush=True)
                    sections.append(section)
        except Exception:  # the other groups are measured
            traceback.print_exc()
            failed = True
    if options.write_tables:
        TABLES.write_text(render(TABLES.read_text("utf-8"), sections), "utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
