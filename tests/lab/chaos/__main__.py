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

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
django.setup()

from tests.services import Database, ServiceMissingError, SQLite, django_database  # noqa: E402

from .arena import HEADS, Arena, Result  # noqa: E402
from .counter import ALIAS, create  # noqa: E402
from .nemesis import PROFILES, Profile  # noqa: E402


def main() -> int:
    """Return 1 if something was lost that must not be lost, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long each profile runs")
    parser.add_argument(
        "--profile", default="all", choices=["all", "today", *PROFILES], help="'today' runs one per day, in turn"
    )
    parser.add_argument(
        "--seed", type=int, default=randbelow(10**9), help="repeats the choice of faults, though not their timing"
    )
    options = parser.parse_args()
    profiles = list(PROFILES.values())
    if options.profile == "today":
        profiles = [profiles[date.today().toordinal() % len(profiles)]]
    elif options.profile != "all":
        profiles = [PROFILES[options.profile]]
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # the proxies are slow on a busy machine, and log it
    failed = []
    print(f"seed {options.seed}\n\n{HEADS}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for profile in profiles:
            random.seed(options.seed)  # so that one profile can be repeated without those before it
            try:
                result = one(SQLite(Path(folder)), profile, options.minutes * 60)
            except ServiceMissingError as error:
                print(f"{profile.name} was left out: {error}")
                continue
            print(result.line(), flush=True)
            failed += result.failures
    print("", *failed[:10], sep="\n")
    return int(bool(failed))


def one(engine: Database | SQLite, profile: Profile, seconds: float, nodes: int = 3) -> Result:
    """Run one profile in a database of its own."""
    with (
        engine.database() as name,
        django_database(ALIAS, engine.settings(name)),
        tempfile.TemporaryDirectory() as folder,
        Arena(Path(folder), profile, engine.settings(name), nodes) as arena,
    ):
        create()
        return arena.run(seconds)


if __name__ == "__main__":
    sys.exit(main())
