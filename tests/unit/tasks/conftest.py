"""Of these tests, none sees a row or a run of another one."""

import django
import pytest

collect_ignore_glob = [] if django.VERSION >= (6, 0) else ["test_*.py"]  # before that there are no such tasks


@pytest.fixture(autouse=True)
def clean():
    from django.tasks import task_backends

    from . import jobs

    yield
    for alias in ("kept", "other"):
        task_backends[alias].clear()
    jobs.ran.clear()
