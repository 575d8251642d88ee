"""
Many processes want one lock: how quickly it passes on, in which order, and at what cost for the nodes.

Times come from the machine's monotonic clock, which all processes share.
"""

import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import NamedTuple
from unittest.mock import patch

import redis

from django_redlock.core.round import Round
from django_redlock.engine.manager import LockManager

from . import peers
from .bench import Bench, children
from .measure import percentile
from .report import OURS, Figure, Section, Target

NAME = "wanted"
HOLD = 0.005  # seconds for which each process holds the lock
STAGGER = 0.01  # seconds between the arrival of two waiters
GRACE = 0.01  # seconds after its first request at which a process counts as queued, if the library does not report it
PATIENCE = 120.0  # seconds after which the run counts as broken


class Turn(NamedTuple):
    """
    The turn of one process: when it asked for the lock, was queued, got the lock and released it.

    With our locks it is queued once the nodes have answered it for the first time. With fifty processes on a few
    processors, tens of milliseconds may pass between its look at the clock and its first request.
    """

    asked: float
    in_line: float
    got: float
    gone: float


def run(bench: Bench) -> Iterator[Section]:
    """Measure one waiter, then many that want the lock once, then many that want it again and again."""
    for nodes in (1, 5):
        yield hand_over(bench, nodes)
    yield _convoy(bench)
    for nodes in (3, 5):
        yield _contention(bench, nodes)


# One waiter


def hand_over(bench: Bench, nodes: int) -> Section:
    """Measure how a lock passes from one process to another that waits for it."""
    section = Section(f"handover-n{nodes}", f"from one process's release to the next one's lock, N = {nodes}")
    names = [OURS, "redlock-py", "pottery Redlock"] + (["redis-py Lock", "python-redis-lock"] if nodes == 1 else [])
    for name in names:
        take = peers.try_blocking(name, bench.urls(nodes))
        if isinstance(take, str):
            section.left_out.append(take)
            continue
        passed = _pass_on(name, take, bench.urls(nodes), bench.rounds(100, 15))
        more = {"p95": percentile(passed, 95) * 1e3}
        section.figures.append(Figure(name, statistics.median(passed) * 1e3, "ms", more))
    if mine := section.value(OURS):
        section.targets.append(Target("median", mine, {1: 0.6, 5: 1.5}[nodes], "ms"))
    return section


def _pass_on(name: str, take: peers.Taker, urls: list[str], times: int) -> list[float]:
    """
    Release the lock the given number of times while another process waits for it; return how long each hand-over took.
    """
    context = children()
    here, there = context.Pipe()
    process = context.Process(target=_waiter, args=(there, name, urls), daemon=True)
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
    take = peers.BLOCKING[name](urls)
    take("elsewhere")()
    pipe.send(0.0)
    while pipe.recv():
        release = take(NAME)
        got = time.monotonic()
        release()
        pipe.send(got)


# Many waiters, each once


def _convoy(bench: Bench) -> Section:
    waiters = 20 if bench.quick else 50
    section = Section("convoy", f"{waiters} waiting processes on five nodes: time until all have been served")
    for name in (OURS, "redlock-py"):
        take = peers.try_blocking(name, bench.urls(5))
        if isinstance(take, str):
            section.left_out.append(take)
            continue
        turns, released = _serve_all(name, take, bench.urls(5), waiters)
        took = max(turn.gone for turn in turns) - released
        share, worst = overtaking(turns)
        section.figures.append(Figure(name, took * 1e3, "ms", {"overtaken %": share * 100, "by at most": worst}))
    section.compare("against redlock-py", "redlock-py", 0.1)
    if section.figures and section.figures[0].name == OURS:
        section.targets.append(Target("waiters overtaken", section.figures[0].more["overtaken %"], 0, "%"))
    return section


def _serve_all(name: str, take: peers.Taker, urls: list[str], waiters: int) -> tuple[list[Turn], float]:
    """Let processes queue up while the lock is held; return their turns, and the time of the release."""
    context = children()
    pipes = []
    for _ in range(waiters):
        here, there = context.Pipe()
        context.Process(target=_once, args=(there, name, urls), daemon=True).start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    release = take(NAME)
    for pipe in pipes:
        pipe.send("go")
        time.sleep(STAGGER)
    time.sleep(0.5)
    released = time.monotonic()
    release()
    return [receive(pipe)[0] for pipe in pipes], released


def _once(pipe: Connection, name: str, urls: list[str]) -> None:
    _note_answers()
    take = peers.BLOCKING[name](urls)
    take(f"elsewhere:{id(pipe)}")()
    pipe.send("ready")
    pipe.recv()
    pipe.send([_turn(take, 0.001)])


_answered: list[float] = []  # when the nodes answered this process


def _note_answers() -> None:
    ask = LockManager.ask

    def noted(self: LockManager, round: Round) -> None:
        ask(self, round)
        _answered.append(time.monotonic())

    patch.object(LockManager, "ask", noted).start()


def _turn(take: peers.Taker, hold: float) -> Turn:
    _answered.clear()
    asked = time.monotonic()
    release = take(NAME)
    got = time.monotonic()
    time.sleep(hold)
    gone = time.monotonic()
    in_line = _answered[0] if _answered else asked + GRACE
    release()
    return Turn(asked, in_line, got, gone)


def receive(pipe: Connection) -> list[Turn]:
    """Return the turns of a child process."""
    if not pipe.poll(PATIENCE):
        raise TimeoutError(f"a waiter had no turn in {PATIENCE:.0f} s")
    turns: list[Turn] = pipe.recv()
    return turns


# Many waiters, again and again


def _contention(bench: Bench, nodes: int) -> Section:
    section = Section(f"contention-n{nodes}", f"processes that take turns, N = {nodes}, each hold {HOLD * 1e3:.0f} ms")
    urls = bench.urls(nodes)
    seconds = 3.0 if bench.quick else 10.0
    for waiters in (20, 50):
        before = scripts_called(urls)
        turns = _take_turns(OURS, urls, waiters, seconds)
        served = [turn for own in turns for turn in own]
        calls = (scripts_called(urls) - before - waiters * 2 * nodes) / len(served)
        section.figures += _figures(waiters, turns, calls)
        if waiters == 50:
            share, _ = overtaking(served)
            section.targets.append(Target("node commands per acquisition, 50 waiters", calls, 12, ""))
            section.targets.append(Target("overtaken, 50 waiters", share * 100, 0, "%"))
            section.targets.append(Target("Jain index, 50 waiters", jain(turns), 0.99, "", least=True))
    return section


def _figures(waiters: int, turns: list[list[Turn]], calls: float) -> list[Figure]:
    served = sorted((turn for own in turns for turn in own), key=lambda turn: turn.got)
    passed = [(later.got - earlier.gone) * 1e3 for earlier, later in pairwise(served)]
    share, worst = overtaking(served)
    starved = sum(len(own) < len(served) / len(turns) / 4 for own in turns)
    return [
        Figure(f"{waiters} waiters: hand-over", statistics.median(passed), "ms", {"p95": percentile(passed, 95)}),
        Figure(f"{waiters} waiters: node commands", calls, "each"),
        Figure(f"{waiters} waiters: past an older waiter", share * 100, "%", {"at most": worst}),
        Figure(f"{waiters} waiters: Jain index", jain(turns), "", {"starved": starved}),
    ]


def _take_turns(name: str, urls: list[str], waiters: int, seconds: float) -> list[list[Turn]]:
    """Let the given number of processes take the lock again and again; return the turns of each."""
    context = children()
    stop = context.Event()
    pipes = []
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
    return [receive(pipe) for pipe in pipes]


def _again(pipe: Connection, stop: Event, name: str, urls: list[str]) -> None:
    _note_answers()
    take = peers.BLOCKING[name](urls)
    take(f"elsewhere:{id(pipe)}")()
    pipe.send("ready")
    pipe.recv()
    turns = []
    while not stop.is_set():
        turns.append(_turn(take, HOLD))
    pipe.send(turns)


def scripts_called(urls: list[str]) -> int:
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


def overtaking(turns: list[Turn]) -> tuple[float, int]:
    """
    Return the share of turns that went past an older waiter, and past how many at most.

    A waiter is older if it was queued before the other process made its first request.
    """
    past = [
        sum(other.in_line < turn.asked and other.got > turn.got for other in turns if other is not turn)
        for turn in turns
    ]
    return sum(count > 0 for count in past) / len(past), max(past)
