"""What users import: the paths, the names, and how little is loaded before a name is used."""

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import django
import pytest

import django_redlock
import django_redlock.testing

# The modules that stay importable, with names that users' code has in its imports.
PATHS = {
    "django_redlock": [*django_redlock.__all__, "__version__"],
    "django_redlock.celery": [
        *("DuplicateTask", "Return", "Singleton", "SingletonOptions", "SingletonResult", "SingletonTask", "SlotHolder"),
        *("override_singleton", "singleton_duplicate", "singleton_lost", "singleton_overlap", "singleton_stolen"),
        "singleton_task",
    ],
    "django_redlock.celery.migration": ["AlreadyQueued", "DuplicateTaskError", "QueueOnce", "Singleton"],
    "django_redlock.compat": ["AsyncLock", "Lock", "LockError", "LockNotOwnedError"],
    "django_redlock.conf": ["InvalidRedlockError"],
    "django_redlock.contrib.debug_toolbar": ["LocksPanel"],
    "django_redlock.contrib.error_reports": ["MaskingReporterFilter"],
    "django_redlock.contrib.health": ["Redlock"],
    "django_redlock.contrib.history": [],
    "django_redlock.contrib.opentelemetry": ["install"],
    "django_redlock.contrib.prometheus": ["install"],
    "django_redlock.contrib.rest_framework": ["exception_handler"],
    "django_redlock.contrib.telemetry": [],
    "django_redlock.exceptions": [
        *("LockLostError", "LockTakenError", "QuorumUnavailableError", "RedlockError", "StaleTokenError"),
    ],
    "django_redlock.fenced_models": ["FencedModel", "FencedQuerySet"],
    "django_redlock.fencing": ["fenced"],
    "django_redlock.inventory": [
        *(
            "HeldLock",
            "NodeStatus",
            "Snapshot",
            "State",
            "View",
            "Waiting",
            "afind_locks",
            "aheld_locks",
            "ask_to_stop",
        ),
        *("find_lock", "find_locks", "force_release", "held_locks", "slugs_of"),
    ],
    "django_redlock.middleware": ["LockErrorMiddleware", "locked_paths"],
    "django_redlock.models": ["Fence", "HeldLock"],
    "django_redlock.operations": ["RequireFence"],
    "django_redlock.querysets": ["LockableQuerySet", "lock_for_update"],
    "django_redlock.routers": ["FencedRouter"],
    "django_redlock.signals": [
        *("lock_acquired", "lock_extended", "lock_forced", "lock_lost", "lock_released", "lock_taken"),
        *("node_down", "node_up"),
    ],
    "django_redlock.tasks": [
        *("CancelledTask", "DuplicateTask", "Singleton", "SingletonResult", "SingletonTask", "SlotHolder"),
        "singleton_task",
    ],
    "django_redlock.testing": django_redlock.testing.__all__,
    "django_redlock.testing.plugin": ["redlock_reset", "redlock_servers", "redlock_simulation"],
    "django_redlock.testing.servers": ["spawn"],
    "django_redlock.testing.proxy": ["FaultProxy"],
    "django_redlock.views": ["locked_view"],
}

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


@pytest.mark.parametrize("path", [path for path in PATHS if not too_new(path)])
def test_path_stays_importable(path: str):
    """The imports of users' code, settings and migrations are where they were."""
    if path == "django_redlock.contrib.debug_toolbar":
        pytest.importorskip("debug_toolbar")
    module = import_module(path)

    assert [name for name in PATHS[path] if not hasattr(module, name)] == []


@pytest.mark.parametrize("module", [django_redlock, django_redlock.testing])
def test_names_that_are_loaded_late_are_listed(module):
    """
    An editor or a shell completes the public names of a module that imports them at their first use, and no others.
    """
    assert dir(module) == sorted(module.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'unheard_of'"):
        _ = module.unheard_of


# Modules that Django looks for by name.
OF_DJANGO = {"admin", "apps", "models"}


def is_internal(path: Path) -> bool:
    """Return whether a module of the package is neither public, nor around a public one, nor Django's."""
    name = ".".join(["django_redlock", *path.with_suffix("").parts]).removesuffix(".__init__")
    of_django = name.rpartition(".")[2] in OF_DJANGO or {"commands", "migrations"} & set(path.parts)
    public = any(name == known or known.startswith(f"{name}.") for known in PATHS)
    return (len(path.parts) > 1 or path.stem == "keys") and not of_django and not public


def test_internal_modules_say_so():
    """The docstring of a module that is not public says that it is internal, and that of a public one does not."""
    package = Path(django_redlock.__file__).parent
    modules = {path.relative_to(package): path.read_text("utf-8") for path in package.rglob("*.py")}
    said = {path: "(internal" in "".join(text.split('"""')[:2]) for path, text in modules.items()}
    public = {path for path in modules if not is_internal(path) and not {"commands", "migrations"} & set(path.parts)}

    assert sorted(str(path) for path in modules if is_internal(path) and not said[path]) == []
    assert sorted(str(path) for path in public if said[path]) == []


@pytest.mark.server
def test_plugin_of_pytest_loads_nothing_of_the_package():
    """
    Loading the plugin imports its own lines alone: what a project's tests do not use is neither loaded nor measured.
    """
    command = [sys.executable, "-c", AS_PYTEST_LOADS_IT]

    child = subprocess.run(command, capture_output=True, text=True, check=True)

    loaded = json.loads(child.stdout)
    ours = [name for name in loaded if name.startswith("django_redlock")]
    assert ours == ["django_redlock", "django_redlock.testing", "django_redlock.testing.plugin"]
    assert [name for name in loaded if name.partition(".")[0] in ("asyncio", "celery", "django", "redis")] == []


def documented() -> Iterator[tuple[str, Any]]:
    """Yield the public functions and classes of the package's own, and the public methods of these classes."""
    for path, names in PATHS.items():
        if path.endswith("debug_toolbar") or path.endswith("plugin") or too_new(path):
            continue
        for name in names:
            found = getattr(import_module(path), name)
            if getattr(found, "__module__", "").startswith("django_redlock") and callable(found):
                yield f"{path}.{name}", found
            if inspect.isclass(found):
                own = {
                    n: m
                    for base in found.__mro__
                    if base.__module__.startswith("django_redlock")
                    for n, m in vars(base).items()
                }
                yield from ((f"{path}.{name}.{each}", value) for each, value in own.items() if is_method(each, value))


def is_method(name: str, value: Any) -> bool:
    return not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property | classmethod))


def test_everything_public_is_documented():
    assert [name for name, found in documented() if not inspect.getdoc(found)] == []


@pytest.mark.parametrize("name", ["fenced", "lock", "lock_for_update", "locked_command", "locked_view"])
def test_every_option_is_described(name: str):
    """An editor shows what each option of a public function is for, in which unit, and which errors it may raise."""
    function = getattr(django_redlock, name)
    text = f"{inspect.getdoc(function)}\n{inspect.getdoc(getattr(function, '__init__', None)) or ''}"

    options = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    assert [each.name for each in options if not re.search(rf"^ *\**{each.name}:", text, re.MULTILINE)] == []
    assert "Raises:" in text
    assert not {"ttl", "wait", "margin"} & {each.name for each in options} or "seconds" in text.lower()
