"""
Type what a page of the documentation says: its files are written and its commands run, one after the other.

A block of Python whose first line is ``# path/of/file.py`` is that file; with ``, at its end`` it is added to the
file. A block of the language ``console`` has commands behind ``$``.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import django_redlock

ROOT = Path(__file__).parents[1]
FILE = re.compile(r"# (\S+\.\w+)(, at its end)?\n")
LONGEST = 120  # seconds of one command


def blocks(page: str, heading: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block of code under a heading, up to the next one."""
    text = (ROOT / page).read_text(encoding="utf-8")
    section = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^##|\Z)", text, re.M | re.S)
    assert section, f"{page} has no heading {heading!r}"
    return re.findall(r"^```(\w+)\n(.*?)^```$", section[1], re.M | re.S)


def commands(block: str) -> list[str]:
    """Return the commands of a block without their output; a command goes on while a quotation mark is open."""
    found = []
    for first, *others in (text.splitlines() for text in re.split(r"^\$ ", block, flags=re.M)[1:]):
        while first.count('"') % 2:
            first += "\n" + others.pop(0)
        found.append(first)
    return found


class Reader:
    """A reader in a folder, who types what the page says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".venv").symlink_to(sys.prefix)
        package = Path(django_redlock.__file__).parent.parent
        path = os.pathsep.join([str(folder / ".venv/bin"), os.environ["PATH"]])
        self.environment = os.environ | {"PATH": path, "PYTHONPATH": str(package)}
        # manage.py is found beside the project.
        for name in ("DJANGO_SETTINGS_MODULE", "PYTHONSAFEPATH", "DJANGO_ALLOW_ASYNC_UNSAFE"):
            self.environment.pop(name, None)

    def type(self, command: str) -> str:
        """Run a command, which must succeed, and return what it printed."""
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def write(self, block: str) -> None:
        """Write the file that a block of Python names, or add the block to it."""
        write(self.folder, block)


def write(folder: Path, block: str) -> None:
    """Write the file in a folder that a block of Python names, or add the block to it."""
    named = FILE.match(block)
    assert named, f"The block does not begin with the name of its file:\n{block}"
    with (folder / named[1]).open("a" if named[2] else "w", encoding="utf-8") as file:
        file.write(block)
