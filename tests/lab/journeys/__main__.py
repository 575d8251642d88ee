"""
Adopt the package in a new project, as its documentation says: ``python -m tests.lab.journeys``.

The project is made by ``django-admin startproject`` in the usual layout, with SQLite and ATOMIC_REQUESTS. Each step is
named after what the user does.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from . import files
from .project import Project


def steps(project: Project) -> Iterator[str]:
    """Walk through the project as a user does; yield each completed step."""
    yield from first_locks(project)
    yield from mistakes_in_settings(project)
    yield from tests(project)


def first_locks(project: Project) -> Iterator[str]:
    """Take locks in a job, in views under ATOMIC_REQUESTS, and around rows."""
    project.write("shop/jobs.py", files.JOBS)
    project.write("shop/views.py", files.VIEWS)
    project.write("mysite/urls.py", files.URLS)
    project.run("manage.py", "migrate", "-v", "0")
    project.run("manage.py", "migrate", "redlock", "--database=locks", "-v", "0")
    assert "no issues" in project.run("manage.py", "check")
    yield "give the locks a file of their own, made by migrate"

    said = project.shell(files.FIRST_LOCKS)
    assert "nightly: done" in said, said
    yield "lock a function"

    assert "kept: 200 kept" in said, said
    assert "around: 200 around" in said, said
    assert "inside: 200 inside" in said, said
    assert "on_commit=True" in said, said  # the warning about the view that would release before the commit
    yield "lock views that are transactions, with a warning where the lock would end before the commit"

    assert "rows: Anna" in said, said
    yield "lock a row for longer than its ttl, and keep the lock"


def mistakes_in_settings(project: Project) -> Iterator[str]:
    """Make mistakes in the settings, and correct them."""
    project.write("shop/apps.py", files.APPS)
    with project.setting('"wait": 5', '"weit": 5'):
        said = project.run("manage.py", "check", fails=True)
    assert "redlock.E007" in said, said
    assert "did you mean 'wait'" in said, said
    yield "mistype an option, and learn of it from the check, though a module has a lock"

    with project.setting("REDLOCK =", "REDLOCKS ="):
        said = project.run("manage.py", "check", fails=True)
    assert "redlock.E001" in said, said
    yield "misspell the setting, and still import the module that has a lock"

    with project.setting("database://locks", "database://default"):
        assert "redlock.W011" in project.run("manage.py", "check")
        said = project.shell(files.OWN_FILE)
    assert said.count("refused:") == 3, said
    assert "this thread's own transaction" in said, said
    assert "database file of their own" in said.replace("\n", " "), said
    assert "entered" not in said, said
    assert "at once" in said, said
    yield "put the locks into the file of the transactions, and get an error at once that names the ways out"


def tests(project: Project) -> Iterator[str]:
    """Run the project's tests with Django's runner and with pytest."""
    project.write("mysite/test_settings.py", files.TEST_SETTINGS)
    project.write("shop/tests.py", files.TESTS)
    project.run("manage.py", "test", "--settings", "mysite.test_settings")
    yield "run the tests with unittest"

    project.write("pytest.ini", files.PYTEST)
    project.append("shop/tests.py", files.PYTEST_TESTS)
    said = project.run("-m", "pytest", "-q", "-p", "no:xdist")
    assert "passed" in said, said
    yield "run the tests with pytest"


def main(tell: Callable[[str], object] = print) -> None:
    """Make the project in a folder of its own and walk through it."""
    with tempfile.TemporaryDirectory() as folder:
        for step in steps(Project(Path(folder))):
            tell(step)


if __name__ == "__main__":
    main()
