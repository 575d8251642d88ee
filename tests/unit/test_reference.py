"""The lists of the reference have what the code has: nothing is missing, and nothing is listed that is not there."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest
from django.core.management import CommandError, call_command

import django_redlock
from django_redlock import locks, signals
from django_redlock.celery import SingletonOptions
from django_redlock.celery import signals as celery_signals
from django_redlock.exceptions import EXPLANATIONS
from django_redlock.management import locked, output
from django_redlock.management.commands import redlock_release, redlock_run
from tests.unit.test_public_api import PATHS, too_new

ROOT = Path(__file__).parents[2]
PACKAGE = Path(django_redlock.__file__).parent
DOCS = ROOT / "docs"
CELERY_EVENTS = [getattr(celery_signals, name).name for name in ("DUPLICATE", "OVERLAP", "LOST", "STOLEN")]


@cache
def page(name: str) -> str:
    folder = "operate" if name in ("commands", "monitoring") else "reference"
    return (DOCS / folder / f"{name}.md").read_text()


def signals_page() -> str:
    return page("events").partition("\n## Log events\n")[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of each row of the tables in a text, without their headings."""
    lines = re.findall(r"^\|.*(?!\n\| ---)$", text, re.MULTILINE)
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0].startswith("`")]


def shown(default: object) -> str:
    """Return a default as a table has it."""
    if default == ():
        return "`[]`"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`".replace(".0`", "`")


def section(name: str, heading: str) -> str:
    return page(name).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def names(text: str) -> list[str]:
    return [name for row in rows(text) for name in re.findall(r"`([^`]+)`", row[0])]


# Options


def test_options_of_an_alias(settings):
    """Every key of OPTIONS is listed once, in the order of the code, with its default."""
    settings.REDLOCK = {"default": {"NODES": "memory://options"}}
    known = {field.name: field.default for field in fields(locks["default"].rules) if field.name != "nodes"}
    listed = {row[0].strip("`"): row[2] for row in rows(section("options", "OPTIONS of an alias"))}

    assert sorted(listed) == sorted(known)
    assert [name for name, default in known.items() if shown(default) not in listed[name]] == []


FUNCTIONS = {
    "lock()": django_redlock.lock,
    "fenced()": django_redlock.fenced,
    "lock_for_update()": django_redlock.lock_for_update,
    "locked_view() and locked_paths()": django_redlock.locked_view,
    "locked_command()": django_redlock.locked_command,
}


def described(subject: Callable[..., object]) -> list[str]:
    """Return the arguments that a docstring describes, from which the page of options is made."""
    listed = (inspect.getdoc(subject) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    return re.findall(r"^ {4}(\w+): ", listed, re.MULTILINE)


def written(pattern: str, path: str = "") -> set[str]:
    """Return what the source has in a place that a pattern describes."""
    return set(re.findall(pattern, "".join(each.read_text() for each in (PACKAGE / path).rglob("*.py"))))


LISTS: dict[str, Callable[[], tuple[object, object]]] = {
    **{
        f"arguments of {heading}": lambda heading=heading, function=function: (
            (function.__name__ in section("options", heading), sorted(described(function))),
            (True, sorted(inspect.signature(function).parameters)),
        )
        for heading, function in FUNCTIONS.items()
    },
    "signals": lambda: (
        names(signals_page().partition("| signal |")[2].partition("\n\n")[0]),
        list(signals.SIGNALS),
    ),
    "signals of singleton tasks": lambda: (names(section("events", "Singleton tasks")), CELERY_EVENTS),
    "reasons of a loss": lambda: (set(names(section("events", "Why a lease ended"))), set(EXPLANATIONS)),
    "log events": lambda: (
        set(names(section("events", "Log events"))),
        written(r'"event": "(\w+)"') | {*CELERY_EVENTS} | written(r'_report\([^()]*"(lock_\w+)"'),
    ),
    "commands": lambda: (
        set(re.findall(r"\[`(redlock_\w+)`\]", section("commands", "Exit codes"))),
        {path.stem for path in (PACKAGE / "management" / "commands").glob("redlock_*.py")},
    ),
    "names in OpenTelemetry": lambda: (
        set(names(section("monitoring", "OpenTelemetry"))),
        written(r'(?:create_\w+|span)\("(redlock[ .][\w.]+)"', "contrib/opentelemetry"),
    ),
}


@pytest.mark.parametrize("what", LISTS)
def test_list_has_what_the_code_has(what: str):
    listed, known = LISTS[what]()

    assert listed == known


def test_options_of_singleton_tasks():
    """Every option is described with all of its values."""
    text = inspect.getdoc(SingletonOptions) or ""

    assert sorted(described(SingletonOptions)) == sorted(field.name for field in fields(SingletonOptions))
    for field in fields(SingletonOptions):
        for value in [] if isinstance(field.type, type) else re.findall(r"'(\w+)'", str(field.type)):
            assert re.search(rf"\b{value}\b", text), (field.name, value)


# Exit codes


def test_exit_codes():
    looking, working = section("commands", "Exit codes").split("| exit code |")
    columns = re.findall(r"\d", looking.partition("| command |")[2].partition("\n")[0])
    first = [line.split("|")[1] for line in working.splitlines() if line.startswith("|")]
    codes = {int(code) for cell in first for code in re.findall(r"\d+", cell)}

    assert columns == ["0", "1", "2", "3", "4", "5"]
    assert (output.MISUSED, output.NO_QUORUM) == (2, 3)
    assert (redlock_release.CHANGED, redlock_release.NOT_REVOKED) == (4, 5)
    assert codes == {0, 1, 2, locked.NO_QUORUM, locked.SKIPPED, locked.LOST, 126, 127}


def test_exit_codes_of_call_command(settings, monkeypatch):
    """The code is the error's, except for an argument that the parser refuses and for the program of redlock_run."""
    settings.REDLOCK = {"default": {"NODES": "memory://exit-codes"}}
    monkeypatch.setattr(redlock_run, "_run", lambda *_: 7)  # the program ends with 7

    with pytest.raises(CommandError) as free:
        call_command("redlock_inspect", "free")
    with pytest.raises(CommandError) as refused:
        call_command("redlock_list", "--sort=colour")
    with pytest.raises(SystemExit) as failed:
        call_command("redlock_run", "job", "--", "program")

    assert free.value.returncode == 1
    assert refused.value.returncode == 1  # 2 on the command line
    assert failed.value.code == 7


# Metrics


def test_metrics_of_prometheus():
    client = pytest.importorskip("prometheus_client")
    source = (PACKAGE / "contrib" / "prometheus" / "__init__.py").read_text()
    defined = set(re.findall(r'"(redlock_\w+)"', source)) - {"redlock_prometheus"}
    listed = {row[0].strip("`"): row for row in rows(section("monitoring", "Prometheus"))}

    assert {name.removesuffix("_total") for name in listed} == defined
    registry = client.CollectorRegistry()
    prometheus = import_module("django_redlock.contrib.prometheus")
    prometheus.install(registry)
    try:
        families = {family.name: family for family in registry.collect()}
    finally:
        prometheus.uninstall()
    for name, row in listed.items():
        assert families[name.removesuffix("_total")].type == row[1], name


# The Python API


def documented() -> Iterator[str]:
    """Yield the full names that the page of the API documents."""
    module = ""
    pattern = r"^\.\. (currentmodule|py:data|auto\w+):: (\S+?)(?:\(\))?$"
    for directive, name in re.findall(pattern, page("api"), re.MULTILINE):
        if directive == "currentmodule":
            module = name
        elif not too_new(module):
            yield f"{module}.{name}"


def test_everything_public_is_in_the_reference():
    """Every name that users import is documented, under the path in the list or under one of the same object."""
    shown = [resolve_name(name) for name in documented()]
    missing = [
        f"{path}.{name}"
        for path, listed in PATHS.items()
        if not too_new(path)
        for name in listed
        if name != "__version__" and not any(resolve_name(f"{path}:{name}") is found for found in shown)
    ]

    assert missing == []
    assert [path for path in PATHS if path not in page("api")] == []
    assert len(shown) == len(set(documented()))
