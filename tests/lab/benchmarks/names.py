"""
Several names at once, all or nothing.
"""

from collections.abc import Iterator
from functools import partial

from django_redlock import LockManager

from . import peers
from .bench import Bench, manager_of
from .measure import Contender, interleave
from .report import OURS, Figure, Section, Target

COUNTS = (1, 10, 100, 1000)
ONE_BY_ONE = ("redlock-py", "pottery Redlock")


def run(bench: Bench) -> Iterator[Section]:
    """Measure each number of names; other libraries take one after the other."""
    section = Section("names", "acquire + release of several names at once, N = 5")
    urls = bench.urls(5)
    times = interleave(_ours(section, urls), bench.rounds(50, 15), batch=3)
    times |= interleave(_others(section, urls, 100 if not bench.quick else 10), bench.rounds(10, 3), batch=1)
    section.figures = [Figure(name, each.median * 1e3, "ms") for name, each in times.items()]
    one, hundred, thousand = (section.value(_title(OURS, count)) for count in (1, 100, 1000))
    if one and hundred:
        section.targets.append(Target("100 names against one", hundred / one, 6))
    if thousand:
        section.targets.append(Target("1,000 names", thousand, 18, "ms"))
    yield section


def _names(count: int) -> list[str]:
    return [f"names:{number}" for number in range(count)]


def _ours(section: Section, urls: list[str]) -> list[Contender]:
    manager, contenders = manager_of(urls), []
    for count in COUNTS:
        try:
            manager.lock(_names(count))
        except ValueError as error:
            section.left_out.append(f"{OURS}, {count:,} names: {error}")
        else:
            contenders.append(Contender(_title(OURS, count), partial(_all_at_once, manager, _names(count))))
    return contenders


def _all_at_once(manager: LockManager, names: list[str]) -> None:
    manager.lock(names, wait=0).acquire().release()


def _others(section: Section, urls: list[str], most: int) -> list[Contender]:
    contenders = []
    for name in ONE_BY_ONE:
        take = peers.try_blocking(name, urls)
        if isinstance(take, str):
            section.left_out.append(take)
            continue
        counts = [count for count in COUNTS if count <= most]
        contenders += [Contender(_title(name, count), partial(_one_by_one, take, _names(count))) for count in counts]
    return contenders


def _title(name: str, count: int) -> str:
    return f"{name}, {count:,} {'name' if count == 1 else 'names'}"


def _one_by_one(take: peers.Taker, names: list[str]) -> None:
    for release in [take(name) for name in names]:
        release()
