"""
Rows of a database, one or many, under one lock and in one fenced transaction.
"""

from collections.abc import Iterator
from functools import partial

from django.conf import settings
from django.core.management import call_command

from .bench import Bench, ours
from .measure import Contender, interleave
from .report import Figure, Section, Target

COUNTS = (1, 10, 100)


def run(bench: Bench) -> Iterator[Section]:
    """Measure each number of rows; the database is SQLite in memory, which costs little of its own."""
    section = Section("rows", "lock_for_update() of several rows, N = 5, SQLite in memory")
    ours("rows", bench.urls(5))
    _prepare()
    contenders = [Contender(_title(count), partial(_lock, count)) for count in COUNTS]
    times = interleave(contenders, bench.rounds(50, 15), batch=3)
    section.figures = [Figure(name, each.median * 1e3, "ms") for name, each in times.items()]
    one, hundred = (section.value(_title(count)) for count in (1, 100))
    if one and hundred:
        section.targets.append(Target("100 rows against one", hundred / one, 6))
    yield section


def _prepare() -> None:
    from django.contrib.auth.models import User

    assert settings.DATABASES["default"]["NAME"] == ":memory:"
    call_command("migrate", verbosity=0)
    User.objects.bulk_create(User(username=str(number)) for number in range(max(COUNTS)))


def _lock(count: int) -> None:
    from django.contrib.auth.models import User

    from django_redlock import lock_for_update

    with lock_for_update(User.objects.all()[:count], using="rows") as rows:
        assert len(rows) == count


def _title(count: int) -> str:
    return f"{count} {'row' if count == 1 else 'rows'}"
