"""What users import: the paths, the names, and how little is loaded before a name is used."""

import json
import re
import subprocess
import sys

import django
import pytest

import django_redlock
import django_redlock.testing
from tests.frozen import FOLDER

# The modules that stay importable, with names that users' code has in its imports; two apps have none.
PATHS: dict[str, list[str]] = {"django_redlock.contrib.history": [], "django_redlock.contrib.telemetry": []}
for line in (FOLDER / "public.txt").read_text("utf-8").splitlines():
    if found := re.match(r"from (\S+) import (\w+)", line):
        PATHS.setdefault(found[1], []).append(found[2])

NEEDED = {"django_redlock.tasks": (6, 0)}  # the first Django that has what a module is about

AS_PYTEST_LOADS_IT = """
import json, sys
import pytest
before = set(sys.modules)
from importlib.metadata import entry_points
[plugin] = [each for each in entry_points(group="pytest11") if each.name == "redlock"]
plugin.load()
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def too_new(path: str) -> bool:
    """Return whether a module needs a later Django than this one."""
    return NEEDED.get(path, ()) > django.VERSION


@pytest.mark.parametrize("module", [django_redlock, django_redlock.testing])
def test_names_that_are_loaded_late_are_listed(module):
    """An editor or a shell completes the public names of a module that imports them at their first use."""
    assert dir(module) == sorted(module.__all__)
    assert {*PATHS[module.__name__]} - {"__version__"} == {*module.__all__}
    with pytest.raises(AttributeError, match="has no attribute 'unheard_of'"):
        _ = module.unheard_of


@pytest.mark.server
def test_plugin_of_pytest_loads_nothing_of_the_package():
    """Tools that a project's tests do not use are neither loaded nor measured."""
    command = [sys.executable, "-c", AS_PYTEST_LOADS_IT]

    child = subprocess.run(command, capture_output=True, text=True, check=True)

    loaded = json.loads(child.stdout)
    ours = [name for name in loaded if name.startswith("django_redlock")]
    assert ours == ["django_redlock", "django_redlock.testing", "django_redlock.testing.plugin"]
    assert [name for name in loaded if name.partition(".")[0] in ("asyncio", "celery", "django", "redis")] == []
