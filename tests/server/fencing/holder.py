"""
A process that stops (SIGSTOP) in a fenced transaction, with a lease that ends meanwhile, and says how it ended.

Run as ``python -m tests.server.fencing.holder PLACE [STATEMENT]``: it stops ``before`` its claim, or ``inside`` its
transaction, there after a statement of SQL. ``HOLDER`` in its environment has its settings in JSON.
"""

import json
import os
import signal
import sys
from typing import Any

SHORT = 2.2  # seconds, for a lease that is meant to end


def main(place: str, *statements: str) -> None:
    configure(**json.loads(os.environ["HOLDER"]))
    from django.db import connection

    from django_redlock import fenced, lock

    from .counting import CounterTable

    lease = lock("story", ttl=30, wait=0).acquire()

    def stop() -> None:
        lease.extend(ttl=SHORT)  # until now it lasted, however busy the machine was
        os.kill(os.getpid(), signal.SIGSTOP)

    def stop_before_the_claim(execute: Any, sql: str, *about: Any) -> Any:
        if place == "before" and sql.startswith("UPDATE") and "redlock_fence" in sql:
            stop()
        return execute(sql, *about)

    try:
        with connection.execute_wrapper(stop_before_the_claim), fenced(lease):
            CounterTable("default").write(1)
            for statement in statements:
                connection.cursor().execute(statement)
            stop()
        print("committed")
    except Exception as error:
        print(type(error).__name__, lease.reason)


def configure(database: dict[str, Any], redlock: dict[str, Any]) -> None:
    import django
    from django.conf import settings

    settings.configure(INSTALLED_APPS=["django_redlock"], DATABASES={"default": database}, REDLOCK=redlock, USE_TZ=True)
    django.setup()


if __name__ == "__main__":
    main(*sys.argv[1:])
