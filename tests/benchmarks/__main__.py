"""
Run the benchmark: ``python -m tests.benchmarks``, or ``tox run -e bench``.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from django_redlock.testing import start_servers

from . import free
from .bench import Bench, set_up
from .report import Section, dump, lines, load

GROUPS: dict[str, Callable[[Bench], Iterator[Section]]] = {
    "free": free.run,
}
"""What ``--only`` can name, in the order in which it is run."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions: less than five minutes")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"groups of rows, from {', '.join(GROUPS)}")
    parser.add_argument("--seconds", type=float, help="how long renewal is watched; 120 by default, 30 with --quick")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="where the figures go")
    parser.add_argument("--rendered", type=Path, help="measure nothing; take the figures from this JSON")
    parser.add_argument("--plots", action="store_true", help="draw docs/images/bench-*.svg")
    parser.add_argument("--write-docs", action="store_true", help="put the figures into docs/benchmarks.md")
    options = parser.parse_args(argv)
    unknown = set(options.only.split(",")) - GROUPS.keys()
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} is not one of {', '.join(GROUPS)}")
    return options


def measure(options: argparse.Namespace) -> list[Section]:
    """Run the groups, and print each section when it is there."""
    sections = []
    seconds = options.seconds or (30.0 if options.quick else 120.0)
    for name in options.only.split(","):
        with start_servers(5) as servers:
            for section in GROUPS[name](Bench(servers, options.quick, seconds)):
                print("\n".join(lines(section)), flush=True)
                sections.append(section)
    return sections


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status says nothing of speed."""
    options = arguments(argv)
    set_up()
    began = time.monotonic()
    sections = load(options.rendered)[0] if options.rendered else measure(options)
    if not options.rendered:
        dump(sections, "python -m tests.benchmarks " + " ".join(sys.argv[1:]), options.json)
        targets = [target for section in sections for target in section.targets]
        kept = sum(target.kept for target in targets)
        print(f"\n{kept} of {len(targets)} targets kept, in {time.monotonic() - began:.0f} s; written to {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
