"""
Many processes want one lock: how quickly it passes on, in which order, and at what cost for the nodes.

Times come from the machine's monotonic clock, which all processes share.
"""

import time
from collections.abc import Iterator
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import NamedTuple

import redis

from . import contenders
from .bench import Bench, children
from .contenders import MANAGER, TAKERS, Taker
from .measure import Times
from .report import Section

NAME = "wanted"
HOLD = 0.005  # seconds for which each process holds the lock
GRACE = 0.1  # seconds after it asked at which a process counts as queued: fifty processes share a few processors
PATIENCE = 120.0  # seconds after which the run counts as broken


class Turn(NamedTuple):
    """The turn of one process: when it asked for the lock, got it and released it."""

    asked: float
    got: float
    gone: float


def run(bench: Bench) -> Iterator[Section]:
    """Measure one waiter, then many that want the lock again and again."""
    for nodes in (1, 5):
        section = Section(f"handover-n{nodes}", f"from one process's release to the next one's lock, N = {nodes}")
        names = (MANAGER, "redis-py Lock", "python-redis-lock", "redlock-py", "pottery Redlock")
        for name, take in contenders.takers(section, bench.urls(nodes), *names).items():
            passed = _pass_on(name, take, bench.urls(nodes), bench.rounds(100, 15))
            section.add_times({name: Times(passed)}, "ms")
        section.add(f"{MANAGER}, the median", section.figures[0].value, "ms", {1: 0.6, 5: 1.5}[nodes])
        yield section
    for nodes in (3, 5):
        yield _contention(bench, nodes)


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


def _contention(bench: Bench, nodes: int) -> Section:
    section = Section(f"contention-n{nodes}", f"processes that take turns, N = {nodes}, each hold {HOLD * 1e3:.0f} ms")
    urls = bench.urls(nodes)
    for waiters in (20, 50):
        before = _scripts_called(urls)
        turns = _take_turns(MANAGER, urls, waiters, 3.0 if bench.quick else 10.0)
        served = sorted((turn for own in turns for turn in own), key=lambda turn: turn.got)
        calls = (_scripts_called(urls) - before - waiters * 2 * nodes) / len(served)
        passed = [max(0.0, later.got - earlier.gone) for earlier, later in pairwise(served)]
        section.add_times({f"{waiters} waiters: hand-over": Times(passed)}, "ms")
        section.add(f"{waiters} waiters: node commands per lock", calls, limit=12 if waiters == 50 else None)
        section.add(f"{waiters} waiters: past an older waiter", overtaking(served) * 100, "%", 0)
        section.add(f"{waiters} waiters: Jain index", jain(turns), limit=0.99, least=True)
    return section


def _take_turns(name: str, urls: list[str], waiters: int, seconds: float) -> list[list[Turn]]:
    """Let the given number of processes take the lock again and again; return the turns of each."""
    context = children()
    stop, pipes = context.Event(), []
    for _ in range(waiters):
        here, there = context.Pipe()
        context.Process(target=_again, args=(there, stop, name, urls), daemon=True).start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send("go")
    time.sleep(seconds)
    stop.set()
    turns = []
    for pipe in pipes:
        if not pipe.poll(PATIENCE):
            raise TimeoutError(f"a waiter had no turn in {PATIENCE:.0f} s")
        turns.append(pipe.recv())
    return turns


def _again(pipe: Connection, stop: Event, name: str, urls: list[str]) -> None:
    take = TAKERS[name](urls)
    take(f"elsewhere:{id(pipe)}")()
    pipe.send("ready")
    pipe.recv()
    turns = []
    while not stop.is_set():
        asked = time.monotonic()
        release = take(NAME)
        got = time.monotonic()
        time.sleep(HOLD)
        gone = time.monotonic()
        release()
        turns.append(Turn(asked, got, gone))
    pipe.send(turns)


def _scripts_called(urls: list[str]) -> int:
    """Return how many scripts all these servers have run; commands inside a script do not count."""
    calls = 0
    for url in urls:
        with redis.Redis.from_url(url) as client:
            stats = client.info("commandstats")
        calls += sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))
    return calls


def jain(turns: list[list[Turn]]) -> float:
    """Return Jain's index of the number of turns: 1 if all had the same number, 1/n if one process had all."""
    counts = [len(own) for own in turns]
    return sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts)) if any(counts) else 0.0


def overtaking(turns: list[Turn]) -> float:
    """Return the share of turns that went past a waiter that was queued before they asked."""
    past = [any(other.asked + GRACE < turn.asked and other.got > turn.got for other in turns) for turn in turns]
    return sum(past) / len(past)
