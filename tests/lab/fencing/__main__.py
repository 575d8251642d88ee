"""Run the stories of the fence on SQLite and three servers: ``python -m tests.lab.fencing [name ...]``."""

import sys
import tempfile
from pathlib import Path

from django_redlock.testing import start_servers

from .holder import configure


def main(names: list[str]) -> None:
    """Run the named stories, or all of them."""
    with tempfile.TemporaryDirectory() as folder, start_servers(3) as servers:
        entries = {
            alias: {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(Path(folder, alias)),
                "OPTIONS": {"timeout": 60},
            }
            for alias in ("default", "other")
        }
        configure(entries, servers.urls)
        tell(entries["default"], servers.urls, names)


def tell(entry: dict, nodes: list[str], names: list[str]) -> None:
    """Run stories in a process in which Django is set up."""
    from . import scenarios, sources
    from .counting import CounterTable, prepare

    for alias in ("default", "other"):
        prepare(alias)
    stage = scenarios.Stage("default", "other", entry, nodes)
    for name in names or scenarios.STORIES:
        print(f"\n{name}")
        CounterTable("default").clear()
        scenarios.STORIES[name](stage)
    sources.forget()


if __name__ == "__main__":
    main(sys.argv[1:])
