"""
Processes that contend for one lock; run as ``python -m tests.server.locking.workers``.

Each of them increments a counter in a file that only the lock protects, and records its fencing tokens.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from django_redlock.core.rules import Rules
from django_redlock.engine.manager import LockManager
from django_redlock.nodes import NodeSpec, open_node


def work(folder: Path, urls: list[str], times: int, options: dict[str, Any]) -> None:
    """Increment the counter the given number of times, under the lock."""
    manager = LockManager([open_node(NodeSpec(url), "t:") for url in urls], Rules(len(urls), **options))
    counter, tokens = folder / "counter", folder / "tokens"
    for _ in range(times):
        with manager.lock("counter") as lease:
            value = int(counter.read_text())
            with tokens.open("a") as log:
                log.write(f"{lease.fencing_token}\n")
            counter.write_text(str(value + 1))
    manager.close()


def main() -> None:
    """Fork the number of processes given in the arguments, and wait for them."""
    order = json.loads(sys.argv[1])
    children = []
    for _ in range(order["processes"]):
        child = os.fork()
        if not child:
            try:
                work(Path(order["folder"]), order["urls"], order["times"], order["options"])
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    sys.exit(f"{len(failed)} processes failed" if failed else 0)


if __name__ == "__main__":
    main()
