"""What users import: the paths, the names, and how little is loaded before a name is used."""

import json
import subprocess
import sys
from importlib import import_module

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
        *("LockReport", "NodeStatus", "Snapshot", "State", "View", "Waiting", "afind_locks", "aheld_locks"),
        *("ask_to_stop", "find_lock", "find_locks", "force_release", "held_locks", "slugs_of"),
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
    """An editor or a shell completes the public names of a module that imports them at their first use."""
    assert dir(module) == sorted(module.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'unheard_of'"):
        _ = module.unheard_of


# Modules that Django looks for by name.
@pytest.mark.server
def test_plugin_of_pytest_loads_nothing_of_the_package():
    """Tools that a project's tests do not use are neither loaded nor measured."""
    command = [sys.executable, "-c", AS_PYTEST_LOADS_IT]

    child = subprocess.run(command, capture_output=True, text=True, check=True)

    loaded = json.loads(child.stdout)
    ours = [name for name in loaded if name.startswith("django_redlock")]
    assert ours == ["django_redlock", "django_redlock.testing", "django_redlock.testing.plugin"]
    assert [name for name in loaded if name.partition(".")[0] in ("asyncio", "celery", "django", "redis")] == []
