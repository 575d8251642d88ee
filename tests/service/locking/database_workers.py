"""
Processes that contend for one lock in which a database has a vote: ``python -m
tests.service.locking.database_workers``.

Until a file ``stop`` appears, each of them increments a counter in a file that only the lock protects, and records
every increment with its fencing token. When there is no quorum, it waits.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from django.conf import settings

from tests.drivers import install_mysql


def work(folder: Path, urls: list[str], options: dict[str, Any]) -> None:
    """Increment the counter under the lock until the file ``stop`` appears."""
    from django_redlock import LockTakenError, QuorumUnavailableError
    from django_redlock.core.rules import Rules
    from django_redlock.engine.manager import LockManager
    from django_redlock.nodes import NodeSpec, open_node

    manager = LockManager([open_node(NodeSpec(url), "t:") for url in urls], Rules(len(urls), **options))
    counter = folder / "counter"
    while not (folder / "stop").exists():
        try:
            with manager.lock("counter", wait=5) as lease:
                value = int(counter.read_text())
                with (folder / "tokens").open("a") as log:
                    log.write(f"{lease.fencing_token}\n")
                counter.write_text(str(value + 1))
        except (LockTakenError, QuorumUnavailableError):
            continue
    manager.close()


def main() -> None:
    """Fork the number of processes given in the arguments, and wait for them."""
    order = json.loads(sys.argv[1])
    install_mysql()
    settings.configure(DATABASES=order["databases"])
    children = []
    for _ in range(order["processes"]):
        child = os.fork()
        if not child:
            try:
                work(Path(order["folder"]), order["urls"], order["options"])
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    sys.exit(f"{len(failed)} processes failed" if failed else 0)


if __name__ == "__main__":
    main()
