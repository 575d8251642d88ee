"""How quickly a lock passes from one process to another that waits; the machine's monotonic clock is that of both."""

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from . import contenders
from .bench import Bench, Times, set_up
from .contenders import SENDS, TAKERS, Taker
from .report import Section

NAME = "wanted"


def run(bench: Bench) -> Iterator[Section]:
    """Measure one node and five."""
    for nodes in (1, 5):
        section = Section(f"handover-n{nodes}", f"from one process's release to the next one's lock, N = {nodes}")
        for name, take in contenders.takers(section, bench.urls(nodes)).items():
            if name != SENDS:
                passed = pass_on(name, take, bench.urls(nodes), bench.rounds(100))
                section.add_times({name: Times(passed)}, "ms")
        yield section


def pass_on(name: str, take: Taker, urls: list[str], times: int) -> list[float]:
    """Release the lock so often while another process waits for it; return how long each hand-over took."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=wait, args=(there, name, urls), daemon=True)
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
    process.join()
    return passed


def wait(pipe: Connection, name: str, urls: list[str]) -> None:
    """Take the lock when told to, and tell when it was taken."""
    set_up()
    take = TAKERS[name](urls)
    take("elsewhere")()
    pipe.send(0.0)
    while pipe.recv():
        release = take(NAME)
        got = time.monotonic()
        release()
        pipe.send(got)
