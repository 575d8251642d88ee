"""The system checks of singleton tasks in the usual layout: ``mysite/celery.py`` and ``shop/tasks.py``."""

from pathlib import Path

from tests.journeys.project import Project

TASKS = """
from celery import shared_task
from django_redlock.celery import singleton_task

@singleton_task(lease=300)
def too_long(): ...

@singleton_task(using="nope")
def elsewhere(): ...
"""


def test_checks_of_singletons_are_run_by_manage_and_by_a_worker(tmp_path: Path):
    """No module has imported the tasks when the checks begin; a worker with a task that cannot work does not start."""
    project = Project(tmp_path)
    worker = ("-m", "celery", "-A", "mysite", "worker", "--pool", "solo")
    project.write("shop/tasks.py", TASKS)

    said = project.run("manage.py", "check", fails=True)
    assert "(redlock.E020)" in said
    assert "(redlock.E021)" in said
    assert said.count("redlock.E020") == 1
    said = project.run(*worker, fails=True)
    assert "redlock.E020" in said
    assert "redlock.E021" in said
