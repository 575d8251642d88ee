"""How quickly a lock passes on to a process that waits; times come from the clock that all processes share."""

import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from . import contenders
from .bench import Bench, children
from .contenders import MANAGER, TAKERS, Taker
from .measure import Times
from .report import Section

NAME = "wanted"
PATIENCE = 120.0  # seconds after which the run counts as broken


def run(bench: Bench) -> Iterator[Section]:
    """Measure one waiter."""
    for nodes in (1, 5):
        section = Section(f"handover-n{nodes}", f"from one process's release to the next one's lock, N = {nodes}")
        names = (MANAGER, "redis-py Lock", "python-redis-lock", "redlock-py", "pottery Redlock")
        for name, take in contenders.takers(section, bench.urls(nodes), *names).items():
            passed = _pass_on(name, take, bench.urls(nodes), bench.rounds(100, 15))
            section.add_times({name: Times(passed)}, "ms")
        section.add(f"{MANAGER}, the median", section.figures[0].value, "ms", {1: 0.6, 5: 1.5}[nodes])
        yield section


def _pass_on(name: str, take: Taker, urls: list[str], times: int) -> list[float]:
    """Release the lock so often while another process waits for it; return how long each hand-over took."""
    here, there = children().Pipe()
    process = children().Process(target=_waiter, args=(there, name, urls), daemon=True)
    process.start()
    passed = []
    here.recv()
    for turn in range(times):
        release = take(NAME)
        here.send("wait for it")
        time.sleep(0.03 + 0.0137 * (turn % 10))  # at a different point of its pauses each time
        start = time.monotonic()
        release()
        passed.append(here.recv() - start)
    here.send("")
    process.join(PATIENCE)
    return passed


def _waiter(pipe: Connection, name: str, urls: list[str]) -> None:
    take = TAKERS[name](urls)
    take("elsewhere")()
    pipe.send(0.0)
    while pipe.recv():
        release = take(NAME)
        got = time.monotonic()
        release()
        pipe.send(got)
