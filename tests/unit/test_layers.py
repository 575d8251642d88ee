"""
The directions of imports: from the edges down to the exceptions, never up.

    edges -> inventory -> handler, signals, conf, checks -> engine -> nodes -> core -> exceptions
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import django_redlock

PACKAGE = Path(django_redlock.__file__).parent

FLOORS = [
    {"exceptions"},
    {"core"},
    {"nodes"},
    {"engine"},
    {"checks", "conf", "handler", "signals"},
    {"inventory"},
]
EDGE = len(FLOORS)  # everything else: admin, views, celery, checks, ...
BELOW_DJANGO = {"exceptions", "core", "nodes", "engine"}

# The nodes that are Django's databases.
OF_DJANGO = {"nodes/database/node.py", "nodes/database/vendors.py", "nodes/database/table.py"}

# The core decides. What it would do with these is the business of those who call it.
NOT_IN_CORE = {
    *("asyncio", "logging", "random", "secrets", "select", "selectors"),
    *("socket", "ssl", "subprocess", "threading", "time"),
}


class Import(NamedTuple):
    """One import: the file that has it, the room of that file, and the full name that it imports."""

    where: str
    room: str
    name: str

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    @property
    def target(self) -> str:
        """The room that is imported, or "" for the package itself."""
        return self.name.split(".")[1] if "." in self.name else ""


def imports_in(source: str, path: Path) -> Iterator[Import]:
    """Yield what a file of the package imports, at its top, in functions and for type checkers alone."""
    room = path.parts[0].removesuffix(".py")
    parents = ("django_redlock", *path.parent.parts)
    for node in ast.walk(parsed(source)):
        for name in imported_names(node, parents):
            yield Import(str(path), room, name)


def parsed(source: str) -> ast.Module:
    """Return the syntax tree; Python before 3.11.8 loses count if another thread parses something at the same time."""
    while True:
        try:
            return ast.parse(source)
        except SystemError as error:
            if "recursion depth mismatch" not in str(error):
                raise


def imported_names(node: ast.AST, parents: tuple[str, ...]) -> list[str]:
    match node:
        case ast.Import(names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module, names, 0):
            return [f"{module}.{alias.name}" for alias in names]
        case ast.ImportFrom(module, names, level):
            base = [*parents[: len(parents) - (level or 0) + 1], *([module] if module else [])]
            return [".".join([*base, alias.name]) for alias in names]
        case _:
            return []


def floor(room: str) -> int:
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), EDGE)


@pytest.fixture(scope="module")
@cache
def imports() -> list[Import]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [
        found for file in files for found in imports_in(file.read_text(encoding="utf-8"), file.relative_to(PACKAGE))
    ]


def test_imports_are_found_in_every_form():
    """
    The reader of imports resolves relative ones, and sees those inside functions.
    """
    source = (
        "import os.path\n"
        "from ..core.rules import Rules\n"
        "from . import base\n"
        "def f():\n"
        "    from .. import __version__\n"
        "    from django.conf import settings\n"
    )

    found = {each.name for each in imports_in(source, Path("nodes/memory.py"))}

    assert found == {
        "os.path",
        "django_redlock.core.rules.Rules",
        "django_redlock.nodes.base",
        "django_redlock.__version__",
        "django.conf.settings",
    }


def test_imports_lead_down(imports):
    """
    No room imports from a floor above its own.
    """
    upwards = [
        each
        for each in imports
        if each.top == "django_redlock" and each.room != "testing" and floor(each.target) > floor(each.room)
    ]

    assert [each for each in upwards if each.target != "__version__"] == []


def test_core_needs_the_standard_library_only(imports):
    """
    The core imports neither other packages nor anything with a clock, a socket or chance in it.
    """
    foreign = [
        each
        for each in imports
        if each.room == "core"
        and each.top != "django_redlock"
        and (each.top not in sys.stdlib_module_names or each.top in NOT_IN_CORE)
    ]

    assert foreign == []


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        ("redis", {"nodes", "testing"}),
        ("celery", {"celery", "contrib", "testing"}),
        ("kombu", {"celery", "contrib", "testing"}),
    ],
)
def test_libraries_are_known_in_their_rooms_only(imports, package, rooms):
    """
    Only the rooms that talk to a library import it.
    """
    assert [each for each in imports if each.top == package and each.room not in rooms] == []


def test_django_begins_at_the_settings(imports):
    """
    What decides, votes and drives works without Django, but for the nodes that are Django's databases.
    """
    found = [each for each in imports if each.top == "django" and each.room in BELOW_DJANGO]

    assert [each for each in found if each.where not in OF_DJANGO] == []


def test_nothing_imports_the_test_tools(imports):
    """
    A production process never loads ``django_redlock.testing``.
    """
    assert [each for each in imports if each.target == "testing" and each.room != "testing"] == []
