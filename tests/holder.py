"""Processes that hold a lock, or wait for one, until they are killed."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

HOLD = """
import json, sys
from django.conf import settings
urls, name, how = json.loads(sys.argv[1])
settings.configure(REDLOCK={"default": {"NODES": urls, "OPTIONS": {"restart_guard": False, "node_timeout": 5.0}}})
from django_redlock import lock
with lock(name, **how):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holding(urls: Sequence[str], name: str, **how: Any) -> "Iterator[subprocess.Popen[str]]":
    """Let another process take a lock, with the arguments *how*, and keep it until its standard input is closed."""
    command = [sys.executable, "-c", HOLD, json.dumps([list(urls), name, how])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def wait_until_held(*processes: "subprocess.Popen[str]") -> None:
    """Wait until each of the processes has its lock."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
