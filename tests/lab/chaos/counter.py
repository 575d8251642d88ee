"""The counters that the workers increment, in a database of any kind: one behind the fence, one without any."""

import random
import time
from typing import Any

from django.core.management import call_command
from django.db import connections, transaction

from django_redlock import fenced
from django_redlock.engine.lease import Lease

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
    if kind == "plain":
        value = read(kind)
        think(pause)
        write(kind, value + 1)
        return
    with fenced(lease, using=ALIAS):
        value = read(kind)
        think(pause)
        write(kind, value + 1)


def think(pause: float) -> None:
    time.sleep(random.uniform(0, pause))


def read(kind: str) -> int:
    return counted(kind)[0]


def write(kind: str, value: int) -> None:
    run("UPDATE counter SET value = %s, done = done + 1 WHERE kind = %s", value, kind)


def counted(kind: str) -> tuple[int, int]:
    """Return the value, and how many increments were committed."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("SELECT value, done FROM counter WHERE kind = %s", [kind])
        return cursor.fetchone()


def run(statement: str, *values: Any) -> None:
    with transaction.atomic(using=ALIAS), connections[ALIAS].cursor() as cursor:
        cursor.execute(statement, values)
