"""
The rows that people pay for, at a distance: free locks, publishing, many tasks and the hand-over between processes.

Between two machines of one data centre a round trip takes about 0.2 to 1 ms, ten times what it takes inside one
machine. Each section has the same contenders as the one without distance, in the same run, at every distance.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from django_redlock.testing import Servers

from . import aio, floors, free, publishing, waiting
from .bench import Bench, in_child
from .measure import interleave
from .peers import SENDS
from .relays import relays
from .report import OURS, Section

ROUND_TRIPS = {"no delay": 0.0, "0.5 ms": 0.0005, "2 ms": 0.002}  # seconds; the first shows the cost of the relay


def run(bench: Bench) -> Iterator[Section]:
    """Measure all sections through relays."""
    yield _round_trips(bench)
    for nodes in (1, 5):
        section = _everywhere(bench, f"free-n{nodes}", partial(free.section_on, nodes=nodes, full=50, quick=8))
        other = "redis-py Lock, on one node"
        for ours, limit, floor in ((OURS, 1.2, floors.SAME), (SENDS, 0.75, floors.SENT)):
            mine, theirs, lowest = (f"{name}, 0.5 ms" for name in (ours, other, floor))
            section.compare(f"{mine}, against {other}", theirs, limit, ours=mine, floor=lowest)
        yield section
    # In a process of its own, because celery-singleton keeps its first connection for as long as the process lives.
    yield _everywhere(bench, "publishing", lambda far: in_child(_publish, far.through, far.quick))
    for nodes in (1, 5):
        yield _everywhere(bench, f"tasks-n{nodes}", partial(aio.tasks_on, nodes=nodes))
    for nodes in (1, 5):
        yield _everywhere(bench, f"handover-n{nodes}", partial(waiting.hand_over, nodes=nodes))


def _publish(through: tuple[str, ...], quick: bool) -> Section:
    return next(publishing.run(Bench(Servers(0), quick, 0.0, through)))


def _round_trips(bench: Bench) -> Section:
    """Measure a PING over a raw socket without a relay, and through one at every distance."""
    section = Section("distance-relay", "one round trip over a raw socket, without and through the relay")
    _ping(section, bench, "without a relay", bench.urls(1)[0])
    for label, seconds in ROUND_TRIPS.items():
        with relays(bench.urls(1), seconds) as urls:
            _ping(section, bench, label, urls[0])
    return section


def _ping(section: Section, bench: Bench, name: str, url: str) -> None:
    with free.ping(name, url) as contender:
        times = interleave([contender], bench.rounds(50, 20))
    section.figures.append(free.figure(name, times[name]))


def _everywhere(bench: Bench, key: str, measure: Callable[[Bench], Section]) -> Section:
    """Return one section with the figures of all distances."""
    whole = Section(f"distance-{key}", "")
    for label, seconds in ROUND_TRIPS.items():
        with relays(bench.urls(5), seconds) as urls:
            section = measure(replace(bench, through=tuple(urls)))
        whole.question = f"{section.question}, through relays"
        whole.figures += [replace(each, name=f"{each.name}, {label}") for each in section.figures]
        whole.left_out += [each for each in section.left_out if each not in whole.left_out]
    return whole
