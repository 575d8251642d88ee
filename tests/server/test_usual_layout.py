"""The system checks in the usual layout: ``mysite/celery.py``, ``shop/tasks.py`` and ``shop/views.py``."""

from pathlib import Path

from tests.lab.journeys.project import Project

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

DECORATED_TASKS = """
from celery import shared_task
from django_redlock import lock

@shared_task
@lock("in a task", ttl=300)
def task(): ...
"""

VIEWS = """
from django.http import HttpResponse
from django.views import View
from django_redlock import lock, locked_view

@lock("in a module of views", ttl=300)
def work(): ...

@locked_view("order:{pk}", ttl=300)
def order(request, pk): ...

@locked_view("page:{pk}", using="nope")
class Page(View): ...
"""

URLS = """
from django.urls import path
from shop import views

urlpatterns = [path("order/<int:pk>/", views.order), path("page/<int:pk>/", views.Page.as_view())]
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


def test_locks_of_decorators_are_checked_in_modules_that_nothing_has_imported(tmp_path: Path):
    """The order of Django's checks is not defined, so this check imports the tasks and the URLs itself."""
    project = Project(tmp_path)
    project.write("shop/tasks.py", DECORATED_TASKS)
    project.write("shop/views.py", VIEWS)
    project.write("mysite/urls.py", URLS)

    said = project.run("manage.py", "check", "--tag", "redlock", fails=True)

    locks = ["in a task", "in a module of views", "view:order:{pk}", "view:page:{pk}"]
    assert [lock for lock in locks if said.count(f"lock {lock!r}, which cannot be taken") != 1] == [], said
