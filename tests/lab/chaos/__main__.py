"""
Let real servers, processes and clocks fail, and count the effect on a counter in a database.

    python -m tests.lab.chaos --minutes 10 --profile network

There are three servers, a Redis Cluster of three masters and three replicas, or three members of etcd or
ZooKeeper, behind proxies. Worker processes take one lock and increment two counters under it, one behind a fence and
one without. A nemesis injects faults. Every acquisition is recorded and checked at the end.
"""

import argparse
import logging
import os
import random
import sys
import tempfile
from datetime import date
from pathlib import Path
from secrets import randbelow

import django


def main() -> int:
    """Return 1 if something was lost that must not be lost, else 0."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from tests.services import SQLite

    from .arena import HEADS
    from .nemesis import PROFILES

    options = parse(list(PROFILES))
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # the proxies are slow on a busy machine, and log it
    failed, freed = [], []
    print(f"seed {options.seed}\n\n{HEADS}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in PROFILES if options.profile == "all" else [options.profile]:
            if missing := missing_for(PROFILES[name].store):
                freed.append(f"{name} was left out: {missing}")
                continue
            random.seed(options.seed)  # so that one profile can be repeated without those before it
            result = one(SQLite(Path(folder)), PROFILES[name], options.minutes * 60)
            print(result.line(), flush=True)
            freed.append(f"{name}: {result.freed()}")
            failed += result.failures
    print("", *freed, *failed[:10], sep="\n")
    return int(bool(failed))


def missing_for(store: str) -> str:
    """Return why a kind of cluster cannot run, and what to install; nothing if it can."""
    from tests.etcd import Member
    from tests.zookeeper import Zoo

    return {"etcd": Member.missing, "zookeeper": Zoo.missing}.get(store, str)()


def one(engine, profile, seconds: float, nodes: int = 3):  # type: ignore[no-untyped-def]
    """Run one profile in a database of its own; returns the result."""
    from tests.services import django_database

    from .arena import Arena
    from .counter import ALIAS, create

    with engine.database() as name, django_database(ALIAS, engine.settings(name)):
        create()
        with (
            tempfile.TemporaryDirectory() as folder,
            Arena(Path(folder), profile, engine.settings(name), nodes) as arena,
        ):
            return arena.run(seconds)


def parse(profiles: list[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.chaos", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="how long each profile runs")
    parser.add_argument(
        "--profile", default="all", choices=["all", "today", *profiles], help="'today' runs one per day, in turn"
    )
    parser.add_argument("--seed", type=int, help="repeats the choice of faults, though not their timing")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = randbelow(10**9)
    if options.profile == "today":
        options.profile = profiles[date.today().toordinal() % len(profiles)]
    return options


if __name__ == "__main__":
    sys.exit(main())
