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

@singleton_task(acks_late=True)
def late(): ...

@singleton_task(on_overlap="follow")
def following(): ...
"""


def test_checks_of_singletons_are_run_by_manage_and_by_a_worker(tmp_path: Path):
    """No module has imported the tasks when the checks begin; a worker with a task that cannot work does not start."""
    project = Project(tmp_path)
    worker = ("-m", "celery", "-A", "mysite", "worker", "--pool", "solo")
    project.write("shop/tasks.py", TASKS)
    project.append("mysite/settings.py", 'CELERY_BROKER_URL = "redis://127.0.0.1:1"\n')

    for command in [("manage.py", "check"), worker]:
        said = project.run(*command, fails=True)
        found = ["redlock.E020", "redlock.E021", "redlock.W021", "redlock.W022"]
        assert {code: said.count(f"({code})") for code in found} == dict.fromkeys(found, 1), said
