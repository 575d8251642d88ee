"""The system checks in the usual layout: ``mysite/celery.py``, ``shop/tasks.py`` and ``shop/views.py``."""

from pathlib import Path

from tests.lab.journeys.project import Project

TASKS = """
from celery import shared_task
from django_redlock import lock
from django_redlock.celery import singleton_task

@singleton_task(lease=300)
def too_long(): ...

@singleton_task(using="nope")
def elsewhere(): ...

@singleton_task(acks_late=True)
def late(): ...

@singleton_task(on_overlap="follow")
def following(): ...

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


def test_checks_import_what_nothing_has_imported(tmp_path: Path):
    """
    The order of Django's checks is not defined, so they import the tasks and the URLs themselves. A worker with a task
    that cannot work does not start.
    """
    project = Project(tmp_path)
    project.write("shop/tasks.py", TASKS)
    project.write("shop/views.py", VIEWS)
    project.write("mysite/urls.py", URLS)
    project.append("mysite/settings.py", 'CELERY_BROKER_URL = "redis://127.0.0.1:1"\n')
    codes = ["redlock.E020", "redlock.E021", "redlock.W021", "redlock.W022"]
    locks = ["in a task", "in a module of views", "view:order:{pk}", "view:page:{pk}"]

    checked = project.run("manage.py", "check", fails=True)
    started = project.run("-m", "celery", "-A", "mysite", "worker", "--pool", "solo", fails=True)

    for said in (checked, started):
        assert {code: said.count(f"({code})") for code in codes} == dict.fromkeys(codes, 1), said
    assert [lock for lock in locks if checked.count(f"lock {lock!r}, which cannot be taken") != 1] == [], checked
