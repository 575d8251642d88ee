"""A Django project in the usual layout, as the commands of Django and the guide of Celery create it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import django_redlock

CELERY = """\
import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mysite.settings")

app = Celery("mysite")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
"""
SETTINGS = """
INSTALLED_APPS += ["django_redlock", "shop"]
DATABASES["default"]["ATOMIC_REQUESTS"] = True
DATABASES["locks"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / "locks.sqlite3"}
REDLOCK = {"default": {"NODES": ["database://locks"], "OPTIONS": {"wait": 5, "node_timeout": 0.9}}}
CELERY_BROKER_URL = "memory://"
"""


class Project:
    """A project ``mysite`` with an app ``shop`` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"PYTHONPATH": str(Path(django_redlock.__file__).parent.parent)}
        for name in ("DJANGO_SETTINGS_MODULE", "PYTHONSAFEPATH", "DJANGO_ALLOW_ASYNC_UNSAFE"):
            self.environment.pop(name, None)
        self.run("-m", "django", "startproject", "mysite", ".")
        self.run("manage.py", "startapp", "shop")
        self.write("mysite/celery.py", CELERY)
        self.write("mysite/__init__.py", 'from .celery import app as celery_app\n\n__all__ = ["celery_app"]\n')
        self.append("mysite/settings.py", SETTINGS)

    def write(self, path: str, text: str) -> None:
        """Write a file of the project."""
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text, encoding="utf-8")

    def append(self, path: str, text: str) -> None:
        """Write something at the end of a file."""
        with (self.folder / path).open("a", encoding="utf-8") as file:
            file.write(text)

    @contextmanager
    def setting(self, old: str, new: str) -> Iterator[None]:
        """Write something else into the settings, and undo that at the end of the block."""
        path = self.folder / "mysite/settings.py"
        before = path.read_text(encoding="utf-8")
        assert old in before, f"the settings lack {old}"
        self.write("mysite/settings.py", before.replace(old, new))
        yield
        self.write("mysite/settings.py", before)

    def shell(self, code: str) -> str:
        """Execute code in the project's shell; return the output."""
        return self.run("manage.py", "shell", "-v", "0", "-c", code)

    def run(self, *command: str, fails: bool = False) -> str:
        """Run Python with these arguments in the project's folder; return its output, and check its exit code."""
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert (done.returncode != 0) is fails, f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}"
        return done.stdout
