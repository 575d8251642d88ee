"""The system checks in the usual layout: ``mysite/celery.py``, ``shop/tasks.py`` and ``shop/views.py``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.fixture
def environment() -> dict[str, str]:
    own = ("DJANGO_SETTINGS_MODULE", "PYTHONSAFEPATH", "DJANGO_ALLOW_ASYNC_UNSAFE")
    path = str(Path(django_redlock.__file__).parent.parent)
    return {name: value for name, value in os.environ.items() if name not in own} | {"PYTHONPATH": path}


def test_checks_import_what_nothing_has_imported(tmp_path: Path, environment: dict[str, str]):
    """The checks import tasks and URLs themselves, and a worker with a task that cannot work does not start."""

    def run(*command: str, fails: bool = False) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert (done.returncode != 0) is fails, f"{command} ended with {done.returncode}\n{done.stdout}"
        return done.stdout

    run("-m", "django", "startproject", "mysite", ".")
    run("manage.py", "startapp", "shop")
    with (tmp_path / "mysite/settings.py").open("a") as settings:
        settings.write(SETTINGS)
    files = {"mysite/celery.py": CELERY, "mysite/__init__.py": "from .celery import app\n", "mysite/urls.py": URLS}
    for name, text in {**files, "shop/tasks.py": TASKS, "shop/views.py": VIEWS}.items():
        (tmp_path / name).write_text(text)
    codes = ["redlock.E020", "redlock.E021", "redlock.W021", "redlock.W022"]
    locks = ["in a task", "in a module of views", "view:order:{pk}", "view:page:{pk}"]

    checked = run("manage.py", "check", fails=True)
    started = run("-m", "celery", "-A", "mysite", "worker", "--pool", "solo", fails=True)

    for said in (checked, started):
        assert {code: said.count(f"({code})") for code in codes} == dict.fromkeys(codes, 1), said
    assert [lock for lock in locks if checked.count(f"lock {lock!r}, which cannot be taken") != 1] == [], checked
