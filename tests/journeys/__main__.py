"""
Adopt the package in a new project, as its documentation says: ``python -m tests.journeys``.

The project is made by ``django-admin startproject`` in the usual layout, with SQLite and ATOMIC_REQUESTS.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from . import files
from .project import Project


def steps(project: Project) -> Iterator[str]:
    """Walk through the project as a user does; yield each completed step."""
    project.write("shop/jobs.py", files.JOBS)
    project.write("shop/views.py", files.VIEWS)
    project.write("mysite/urls.py", files.URLS)
    project.run("manage.py", "migrate", "-v", "0")
    project.run("manage.py", "migrate", "redlock", "--database=locks", "-v", "0")
    assert "no issues" in project.run("manage.py", "check")
    said = project.run("manage.py", "shell", "-v", "0", "-c", "from shop.jobs import nightly; print(nightly())")
    assert "done" in said, said
    yield "locks have a file of their own, made by migrate"

    yield from mistakes_in_settings(project)
    yield from tests(project)


def mistakes_in_settings(project: Project) -> Iterator[str]:
    """Make mistakes in the settings and in tasks, and undo them."""
    settings = (project.folder / "mysite/settings.py").read_text(encoding="utf-8")

    project.write(
        "shop/apps.py",
        "from django.apps import AppConfig\n\nfrom . import jobs\n\n\nclass ShopConfig(AppConfig):\n"
        '    name = "shop"\n    jobs = jobs\n',
    )
    project.write("mysite/settings.py", settings.replace('"wait": 5', '"weit": 5'))
    said = project.run("manage.py", "check", fails=True)
    assert "redlock.E007" in said, said
    assert "did you mean 'wait'" in said, said
    yield "a typo in OPTIONS is reported by the check, though a module has a lock"

    project.write("shop/tasks.py", files.TOO_LONG)
    project.write("mysite/settings.py", settings)
    assert "redlock.E020" in project.run("manage.py", "check", fails=True)
    project.write("shop/tasks.py", files.TOO_LONG.replace("lease=300", "lease=30"))
    yield "a task that cannot work is reported by the check"

    project.write("mysite/settings.py", settings.replace("database://locks", "redis://:pa/ss@lock-1"))
    said = project.run("manage.py", "check", fails=True)
    assert "percent-encoded" in said, said
    assert "pa/ss" not in said, said
    yield "a password that is not percent-encoded is reported, and not shown"

    project.write("mysite/settings.py", settings.replace("database://locks", "database://default"))
    assert "redlock.W011" in project.run("manage.py", "check")
    said = project.run("manage.py", "shell", "-v", "0", "-c", files.OWN_FILE)
    assert "this thread's own transaction" in said, said
    assert "database file of their own" in said.replace("\n", " "), said
    assert "entered" not in said, said
    assert "at once" in said, said
    project.write("mysite/settings.py", settings)
    yield "locks in the file of the project's own transactions fail at once, with the ways out"


def tests(project: Project) -> Iterator[str]:
    """Run the project's tests with Django's runner and with pytest."""
    project.write("mysite/test_settings.py", files.TEST_SETTINGS)
    project.write("shop/tests.py", files.TESTS)
    project.run("manage.py", "test", "--settings", "mysite.test_settings")
    yield "the tests pass under unittest"

    project.write("pytest.ini", files.PYTEST)
    project.append("shop/tests.py", files.PYTEST_TESTS)
    said = project.run("-m", "pytest", "-q", "-p", "no:xdist")
    assert "passed" in said, said
    yield "the tests pass under pytest"


def main(tell: Callable[[str], object] = print) -> None:
    """Make the project in a folder of its own and walk through it."""
    with tempfile.TemporaryDirectory() as folder:
        for step in steps(Project(Path(folder))):
            tell(step)


if __name__ == "__main__":
    main()
