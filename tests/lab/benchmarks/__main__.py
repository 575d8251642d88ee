"""
Run the benchmark: ``python -m tests.lab.benchmarks``, or ``tox run -e bench``.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from django_redlock.testing import start_servers

from . import (
    against,
    aio,
    distance,
    faults,
    free,
    kinds,
    listing,
    names,
    pages,
    plots,
    publishing,
    renewal,
    rows,
    startup,
    syscalls,
    waiting,
)
from .bench import Bench, set_up
from .report import Section, dump, lines, load

Group = Callable[[Bench], Iterator[Section]]

GROUPS: dict[str, Group] = {
    "distance": distance.run,
    "free": free.run,
    "asyncio": aio.run,
    "faults": faults.run,
    "renewal": renewal.run,
    "waiting": waiting.run,
    "names": names.run,
    "rows": rows.run,
    "syscalls": syscalls.run,
    "listing": listing.run,
    "startup": startup.run,
    "publishing": publishing.run,
    "kinds": kinds.run,
}
"""What ``--only`` can name, in the order in which it is run."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions: less than five minutes")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"groups of rows, from {', '.join(GROUPS)}")
    parser.add_argument("--seconds", type=float, help="how long to observe renewal; 120 by default, 30 with --quick")
    parser.add_argument(
        "--against", type=Path, metavar="WHEEL", help="measure only how this checkout compares with another version"
    )
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="file for the figures")
    parser.add_argument(
        "--rendered", type=Path, metavar="JSON", help="measure nothing; make plots and docs from this run"
    )
    parser.add_argument("--plots", action="store_true", help="draw docs/images/bench-*.svg")
    parser.add_argument("--write-docs", action="store_true", help="put the figures into the pages of the documentation")
    options = parser.parse_args(argv)
    unknown = set(options.only.split(",")) - GROUPS.keys()
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} is not one of {', '.join(GROUPS)}")
    return options


def measure(options: argparse.Namespace) -> list[Section]:
    """Run the groups and print each section when it is ready; a group that fails does not stop the others."""
    sections = []
    seconds = options.seconds or (30.0 if options.quick else 120.0)
    chosen = {name: GROUPS[name] for name in options.only.split(",")}
    if options.against:
        chosen = {"against": partial(against.run, other=options.against)}
    for name, run in chosen.items():
        for section in _group(name, run, options.quick, seconds):
            print("\n".join(lines(section)), flush=True)
            sections.append(section)
    return sections


def _group(name: str, run: Group, quick: bool, seconds: float) -> Iterator[Section]:
    try:
        with start_servers(5) as servers:
            yield from run(Bench(servers, quick, seconds))
    except Exception as error:
        traceback.print_exc()
        yield Section(name, "failed", left_out=[f"the rest of {name!r}: {type(error).__name__}: {error}"])


def summary(sections: Sequence[Section], seconds: float) -> str:
    """Return the last line of a run."""
    targets = [target for section in sections for target in section.targets]
    kept = sum(target.kept for target in targets)
    return f"\n{kept} of {len(targets)} targets kept, in {seconds:.0f} s."


def publish(options: argparse.Namespace) -> None:
    """Write the plots and the pages, if requested, from the figures in the JSON."""
    sections, run = load(options.rendered or options.json)
    if options.plots:
        plots.draw_all(sections, pages.IMAGES)
    if options.write_docs:
        for page in pages.PAGES:
            page.write_text(pages.render(page.read_text("utf-8"), sections, run), "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status reports whether all of it ran, not how fast it was."""
    options, failed = arguments(argv), False
    if not options.rendered:
        set_up()
        began = time.monotonic()
        sections = measure(options)
        dump(sections, "python -m tests.lab.benchmarks " + " ".join(sys.argv[1:]), options.json)
        failed = any(section.question == "failed" for section in sections)
        print(summary(sections, time.monotonic() - began), f"The figures are in {options.json}.")
    publish(options)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
