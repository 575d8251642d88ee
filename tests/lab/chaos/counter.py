"""The counters that the workers increment, in a database of any kind: one behind the fence, one without any."""

import random
import time
from contextlib import nullcontext
from typing import Any

from django.core.management import call_command
from django.db import connections, transaction

from django_redlock import Lease, fenced

ALIAS = "chaos"
KINDS = ("fenced", "plain")


def create() -> None:
    """Make the tables."""
    call_command("migrate", "redlock", database=ALIAS, verbosity=0)
    run("CREATE TABLE counter (kind varchar(10) PRIMARY KEY, value integer, done integer)")
    for kind in KINDS:
        run("INSERT INTO counter VALUES (%s, 0, 0)", kind)


def increment(kind: str, lease: Lease, pause: float) -> None:
    """Read, pause, write; *done* counts the commits whatever was read, so that a lost increment shows."""
    with fenced(lease, using=ALIAS) if kind == "fenced" else nullcontext():
        value, _ = counted(kind)
        time.sleep(random.uniform(0, pause))
        run("UPDATE counter SET value = %s, done = done + 1 WHERE kind = %s", value + 1, kind)


def counted(kind: str) -> tuple[int, int]:
    """Return the value, and how many increments were committed."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("SELECT value, done FROM counter WHERE kind = %s", [kind])
        return cursor.fetchone()


def run(statement: str, *values: Any) -> None:
    with transaction.atomic(using=ALIAS), connections[ALIAS].cursor() as cursor:
        cursor.execute(statement, values)
