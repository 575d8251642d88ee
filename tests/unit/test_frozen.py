"""
What semantic versioning covers: all that users write, and what their programs read.

It is in a file, so that a change is seen in review. The records on the nodes are in others: see
tests/server/locking/test_frozen_keys.py. Types are left to tests/typing/usage.py.
"""

import inspect
import json
import re
from collections.abc import Iterator
from io import StringIO
from pkgutil import resolve_name
from typing import Any

import pytest
from django.core.management import call_command, load_command_class
from django.core.management.base import BaseCommand

from django_redlock import lock
from django_redlock.celery import SingletonOptions
from tests.frozen import FOLDER, compare
from tests.unit.test_public_api import PATHS, too_new
from tests.unit.test_reference import PACKAGE, described, names, page, rows, section, signals_page

RULES = """
Between two major versions, nothing here may go or change its meaning. No argument may lose its name, its place or its
default. Keep the old way beside the new one, and let it warn. What is new needs a line in CHANGELOG.md, and its place
in docs/reference.
"""
# Other defaults are shown differently by versions of Python; the default of a parameter without one is a class.
PLAIN = str | bytes | int | float | tuple | type | None
DIRECTIVE = re.compile(r"^ *\.\. (currentmodule|py:data|auto\w+):: (\S+)\n(?: +(:members:.*)\n)?", re.MULTILINE)


def called(name: str, found: Any) -> str:
    """Return a name with the parameters, their kinds and their defaults, if it is a function."""
    if not callable(found):
        return name
    shown = [
        each.replace(annotation=each.empty, default=each.default if isinstance(each.default, PLAIN) else ...)
        for each in inspect.signature(found).parameters.values()
    ]
    return f"{name}{inspect.Signature(shown)}".replace("Ellipsis", "...")


def python() -> Iterator[str]:
    """Yield the names that can be imported, and what the page of the API lists, as users call it."""
    yield from (f"from {path} import {name}" for path, listed in PATHS.items() for name in listed)
    module = outer = ""
    for directive, name, members in DIRECTIVE.findall(page("api")):
        if directive == "currentmodule":
            module = name
            yield from frozen(module) if too_new(module) else ()
        elif too_new(module):
            continue
        elif directive in ("automethod", "autoattribute"):
            yield member(f"{module}.{outer}", name)
        else:
            outer = name.removesuffix("()")
            full = f"{module}.{outer}"
            made_by_users = outer == name and directive in ("autoclass", "autofunction") and "plugin" not in module
            yield called(full, resolve_name(full)) if made_by_users else full
            listed = public(resolve_name(full)) if members == ":members:" else re.findall(r"\w+", members)[1:]
            yield from (member(full, each) for each in listed)


def frozen(module: str) -> list[str]:
    """Return what the file says of a module that needs a later Django: it stays as it is."""
    return [line for line in (FOLDER / "public.txt").read_text("utf-8").splitlines() if line.startswith(f"{module}.")]


def public(kind: type) -> list[str]:
    """Return the documented members of a class, also those of its bases in this package."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("django_redlock")]
    found = {name: value for base in bases for name, value in vars(base).items() if not name.startswith("_")}
    return sorted(name for name, value in found.items() if callable(value) or isinstance(value, property))


def member(owner: str, name: str) -> str:
    value = inspect.getattr_static(resolve_name(owner), name)
    return called(f"{owner}.{name}", inspect.unwrap(value) if inspect.isfunction(value) else None)


def commands() -> Iterator[str]:
    """Yield the options of each command, without those of Django."""
    of_django = {option for action in BaseCommand().create_parser("", "")._actions for option in action.option_strings}
    for path in sorted((PACKAGE / "management" / "commands").glob("redlock_*.py")):
        parser = load_command_class("django_redlock", path.stem).create_parser("", path.stem)
        for action in parser._actions:
            words = [*action.option_strings] or [action.dest]
            if not of_django & {*words}:
                yield f"{path.stem} {'|'.join(words)}"


def paths(value: Any, before: str = "") -> Iterator[str]:
    """Yield the path of each key of a document."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield f"{before}{key}"
        yield from paths(inner, f"{before}{key}.")
    for inner in value[:1] if isinstance(value, list) else ():
        yield from paths(inner, f"{before[:-1]}[].")


def documents() -> Iterator[str]:
    """Yield the keys of the commands' JSON."""
    with lock("frozen", wait=0):
        for words in (["redlock_list"], ["redlock_inspect", "frozen"], ["redlock_doctor"]):
            out = StringIO()
            call_command(*words, format="json", stdout=out)
            yield from (f"{words[0]} {path}" for path in paths(json.loads(out.getvalue())))


def exit_codes() -> Iterator[str]:
    for line in section("commands", "Exit codes").splitlines():
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if command := re.match(r"\[`(redlock_\w+)`\]", first):
            yield f"{command[1]} {' '.join(str(code) for code, cell in enumerate(cells) if cell)}"
        elif re.match(r"\d", first):
            yield f"{first} of work under a lock"


@pytest.fixture(scope="module")
def importable() -> list[str]:
    """The names of Python, as they are before the tests of this tier change a default."""
    for path in PATHS:
        if not too_new(path):
            pytest.importorskip(path)
    return list(python())


def test_what_users_write_and_read_stays(settings, importable: list[str]):
    """Imports, signatures, settings, commands, checks, exit codes, JSON, signals, events and metrics stay."""
    settings.REDLOCK = {"default": {"NODES": "memory://frozen"}}
    found = {
        "Python": importable,
        "Settings": names(page("settings").partition("\n## Nodes\n")[0]),
        "OPTIONS of an alias": [f"{row[0]} {row[2]}" for row in rows(section("options", "OPTIONS of an alias"))],
        "Options of singleton tasks": described(SingletonOptions),
        "Commands": commands(),
        "Exit codes": exit_codes(),
        "JSON": documents(),
        "Checks": re.findall(r"^\| `(redlock\.\w+)`", page("checks"), re.MULTILINE),
        "Signals": [f"{row[0]} {row[2]}" for row in rows(signals_page()) if len(row) == 3],
        "Log events": names(section("events", "Log events")),
        "Metrics": names(section("monitoring", "Prometheus")) + names(section("monitoring", "OpenTelemetry")),
    }

    compare("public.txt", found, RULES)
