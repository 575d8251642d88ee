"""
Run commands of Python in forks of a process that has loaded Django and Celery: a fork costs a fraction of a start.

Each line of standard input is a JSON object with ``argv``, ``folder``, two files (``output`` and ``errors``) and
``wait``. Each line of standard output is the exit code, or the process id if the command is left running. At the end of
its input the process kills the commands that are still running.
"""

import atexit
import json
import os
import runpy
import sys
from contextlib import suppress
from importlib import import_module
from signal import SIGKILL

LOADED = [
    *("celery.app.trace", "celery.apps.worker", "celery.bin.celery", "celery.concurrency.solo"),
    *("django.core.management", "django.db.backends.sqlite3.base", "django.db.migrations.executor", "django.forms"),
    *("django.template.backends.django", "django.test", "django.test.runner", "django.views.generic"),
    *("django_redlock.celery", "django_redlock.engine.manager", "django_redlock.inventory", "kombu.transport"),
    *("django_redlock.nodes.database.node", "celery.worker.consumer", "kombu.transport.filesystem"),
]


def run(argv: list[str], folder: str, output: str, errors: str) -> None:
    """Become the command: ``python FILE ...`` or ``celery ...``."""
    os.setsid()
    os.chdir(folder)
    for number, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[:0] = [folder]
    if argv[0] == "celery":
        sys.argv = argv
        runpy.run_module("celery", run_name="__main__")
    else:
        sys.argv = argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")


def fork(argv: list[str], folder: str, output: str, errors: str, wait: bool) -> int:
    """Run a command in a fork; return its exit code, or its process id."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            run(argv, folder, output, errors)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            atexit._run_exitfuncs()  # among them the one that removes a worker's pid file
            with suppress(ValueError, OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if wait else pid


def ended() -> set[int]:
    """Wait for the commands that have ended: until then a killed worker counts as running."""
    found = set()
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            found.add(pid)
    return found


def main() -> None:
    for name in LOADED:
        with suppress(ImportError):
            import_module(name)
    running: set[int] = set()
    for line in sys.stdin:
        running -= ended()
        job = json.loads(line)
        result = fork(**job)
        if not job["wait"]:
            running.add(result)
        print(result, flush=True)
    for pid in running:  # none of these has been waited for, so the process id is still its own
        os.kill(pid, SIGKILL)


if __name__ == "__main__":
    main()
