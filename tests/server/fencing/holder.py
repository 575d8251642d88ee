"""
A process that stops (SIGSTOP) in a fenced transaction, with a lease that ends meanwhile, and says how it ended.

Run as ``python -m tests.server.fencing.holder PLACE``: it stops ``before`` its claim, or ``inside`` its transaction.
``HOLDER`` in its environment has its settings in JSON.
"""

import json
import os
import signal
import sys
from typing import Any

import django
from django.conf import settings
from django.db import connection

SHORT = 2.2  # seconds, for a lease that is meant to end


def main(place: str, database: dict[str, Any], redlock: dict[str, Any]) -> None:
    settings.configure(INSTALLED_APPS=["django_redlock"], DATABASES={"default": database}, REDLOCK=redlock, USE_TZ=True)
    django.setup()
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
            stop()
        print("committed")
    except Exception as error:
        print(type(error).__name__, lease.reason)


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(os.environ["HOLDER"]))
