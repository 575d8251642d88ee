"""The commands in the README work as written."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import django_redlock

README = Path(__file__).parents[2] / "README.md"
INSTALLATION = "python3 -m venv .venv && .venv/bin/pip install django-redlock"


def blocks(heading: str) -> Iterator[tuple[str, str]]:
    """Yield the language and text of every block of code under a heading, up to the next one."""
    section = re.search(rf"^#+ {heading}$(.*?)^##", README.read_text(encoding="utf-8"), re.M | re.S)
    assert section, f"the README has no heading {heading!r}"
    yield from re.findall(r"^```(\w+)\n(.*?)^```$", section[1], re.M | re.S)


def commands(block: str) -> list[str]:
    """Return the typed commands; the lines of one command belong together."""
    return [command.strip() for command in re.split(r"^\$ ", block, flags=re.M) if command.strip()]


def test_quick_start_without_redis_works_from_an_empty_folder(tmp_path: Path):
    """
    The lines of "No Redis at hand", typed one after the other, end with a list of the lock that they took.

    The first command creates an environment; the environment of the tests takes its place.
    """
    (tmp_path / ".venv").symlink_to(sys.prefix)
    package = Path(django_redlock.__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(package)}
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    environment.pop("PYTHONSAFEPATH", None)  # manage.py is found beside the project
    said, typed = "", []

    for language, text in blocks("No Redis at hand"):
        if language == "python":
            file = re.match(r"# (\S+), at its end\n", text)
            assert file
            with (tmp_path / file[1]).open("a") as settings:
                settings.write(text)
        for command in commands(text) if language == "console" else []:
            typed.append(command)
            if command != INSTALLATION:
                done = subprocess.run(
                    command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
                )
                assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
                said = done.stdout

    assert typed[0] == INSTALLATION
    assert len(typed) == 5
    assert "invoice-run" in said
