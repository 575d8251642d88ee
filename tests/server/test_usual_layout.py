"""The system checks in the usual layout: ``mysite/celery.py``, ``shop/tasks.py`` and ``shop/views.py``."""

import os
import subprocess
import sys
from pathlib import Path

import django_redlock

CELERY = """
import os
from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mysite.settings")
app = Celery("mysite")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
"""

SETTINGS = """
INSTALLED_APPS += ["django_redlock", "shop"]
DATABASES["locks"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / "locks.sqlite3"}
REDLOCK = {"default": {"NODES": ["database://locks"]}}
CELERY_BROKER_URL = "redis://127.0.0.1:1"
"""

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


class Project:
    """A project ``mysite`` with an app ``shop``, as the commands of Django and the guide of Celery create it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = os.environ | {"PYTHONPATH": str(Path(django_redlock.__file__).parent.parent)}
        for name in ("DJANGO_SETTINGS_MODULE", "PYTHONSAFEPATH", "DJANGO_ALLOW_ASYNC_UNSAFE"):
            self._environment.pop(name, None)
        self.run("-m", "django", "startproject", "mysite", ".")
        self.run("manage.py", "startapp", "shop")
        self.write("mysite/celery.py", CELERY)
        self.write("mysite/__init__.py", "from .celery import app\n")
        self.write("mysite/settings.py", (folder / "mysite/settings.py").read_text() + SETTINGS)

    def write(self, path: str, text: str) -> None:
        (self._folder / path).write_text(text)

    def run(self, *command: str, fails: bool = False) -> str:
        """Run Python with these arguments; return its output, and check whether it fails."""
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert (done.returncode != 0) is fails, f"{command} ended with {done.returncode}\n{done.stdout}"
        return done.stdout


def test_checks_import_what_nothing_has_imported(tmp_path: Path):
    """
    The order of Django's checks is not defined, so they import the tasks and the URLs themselves. A worker with a task
    that cannot work does not start.
    """
    project = Project(tmp_path)
    project.write("shop/tasks.py", TASKS)
    project.write("shop/views.py", VIEWS)
    project.write("mysite/urls.py", URLS)
    codes = ["redlock.E020", "redlock.E021", "redlock.W021", "redlock.W022"]
    locks = ["in a task", "in a module of views", "view:order:{pk}", "view:page:{pk}"]

    checked = project.run("manage.py", "check", fails=True)
    started = project.run("-m", "celery", "-A", "mysite", "worker", "--pool", "solo", fails=True)

    for said in (checked, started):
        assert {code: said.count(f"({code})") for code in codes} == dict.fromkeys(codes, 1), said
    assert [lock for lock in locks if checked.count(f"lock {lock!r}, which cannot be taken") != 1] == [], checked
