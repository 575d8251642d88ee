"""What several instruments share: processes of Celery and their surroundings."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import django

from django_redlock.testing.servers import spawn


def set_up(nodes: Sequence[str], options: dict[str, Any], **environment: str) -> None:
    """Make this process, and those that it starts, a Django project with these nodes."""
    settings = {"DJANGO_SETTINGS_MODULE": "tests.lab.settings", "LAB_NODES": ",".join(nodes)}
    os.environ |= settings | {"LAB_OPTIONS": json.dumps(options)} | environment
    django.setup()


def surroundings(**environment: str) -> dict[str, str]:
    """Return the environment of a process that imports what this one imports."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment


def celery(app: str, *arguments: str, log: Path | None = None, **environment: str) -> subprocess.Popen[bytes]:
    """Start a program of Celery, which ends with this process."""
    command = [sys.executable, "-m", "celery", "-A", app, *arguments]
    with open(log or os.devnull, "ab") as output:
        return spawn(command, env=surroundings(**environment), stdout=output, stderr=output)


def worker(app: str, *arguments: str, log: Path | None = None, **environment: str) -> subprocess.Popen[bytes]:
    """Start a worker."""
    return celery(app, "worker", "--without-gossip", "--without-mingle", *arguments, log=log, **environment)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill processes."""
    for process in processes:
        process.kill()
        process.wait()
