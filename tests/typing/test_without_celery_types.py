"""Celery itself has no types, and users need not install any for pyright to check the calls of a singleton."""

import subprocess
import sys
import venv
from pathlib import Path

import celery
import pytest

USAGE = """\
# pyright: basic, reportUnnecessaryTypeIgnoreComment=true
from typing import Any, assert_type

from django_redlock.celery import SingletonResult, SingletonTask, singleton_task


@singleton_task(bind=True)
def sync(self: SingletonTask[..., Any], shop: int) -> str:
    return str(shop)


assert_type(sync(7), str)
assert_type(sync.delay(7), SingletonResult[str])
assert_type(sync.singleton.is_locked(7), bool)
sync.apply_async((7,), countdown=5)
sync.delay_on_commit(7)
sync.delay("7")  # pyright: ignore[reportArgumentType]
"""


@pytest.mark.endurance
def test_singleton_is_typed_without_celery_types(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    (site,) = tmp_path.glob("venv/lib/*/site-packages")
    for package in Path(celery.__file__).parents[1].iterdir():
        if not package.name.endswith("-stubs") or package.name == "django-stubs":
            (site / package.name).symlink_to(package)
    (tmp_path / "usage.py").write_text(USAGE, encoding="utf-8")

    command = [sys.executable, "-m", "pyright", "--pythonpath", str(tmp_path / "venv/bin/python"), "usage.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert not done.returncode, done.stdout + done.stderr
