"""
The directions of imports: from the edges down to the exceptions, never up.

    edges -> db -> inventory -> handler, signals, conf, checks -> engine -> nodes -> core -> exceptions
"""

import ast
import sys
from collections.abc import Iterator, Mapping
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
    {"checks", "conf", "handler", "routers", "signals"},
    {"inventory"},
    {"db", "keys", "singleton", "web"},  # what doors such as views and tasks share; these rooms never import a door
]
EDGE = len(FLOORS)  # everything else: admin, views, celery, checks, ...
BELOW_DJANGO = {"exceptions", "core", "nodes", "engine"}

# The nodes that are Django's databases.
OF_DJANGO = {f"nodes/database/{name}.py" for name in ("node", "table", "vendors")}

# The core decides. Its callers do everything for which these modules would be needed.
NOT_IN_CORE = {
    *("asyncio", "logging", "random", "secrets", "select", "selectors"),
    *("socket", "ssl", "subprocess", "threading", "time"),
}

# The engine takes these from its ``Runtime``, so that a simulation can pass its own.
OF_RUNTIME = {
    *("time", "random", "django_redlock.nodes.clock.steady"),
    *(f"django_redlock.engine.watchdog.{name}" for name in ("watchdog", "loop_watchdog")),
}

# Who may import it: the runtime of real processes, and the watchdogs that belong to such a process.
REAL_TIME = {"engine/manager.py", "engine/watchdog.py"}

# The modules that Django and users expect at the top. Every other module has a room.
PUBLIC = {
    *("__init__", "apps", "checks", "compat", "conf", "exceptions", "fenced_models", "fencing", "handler", "keys"),
    *("middleware", "models", "operations", "querysets", "routers", "signals", "views"),
}

MAX_BODY = 60  # lines of a function, without its docstring


class Import(NamedTuple):
    """One import: the file that has it, the room of that file, the full name, and whether the import is ever made."""

    where: str
    room: str
    name: str
    at_run_time: bool = True

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    @property
    def target(self) -> str:
        """The room that is imported, or "" for the package itself."""
        return self.name.split(".")[1] if "." in self.name else ""


def imports_in(source: str, path: Path) -> Iterator[Import]:
    """Yield the imports of a file of the package: at its top, in functions and for type checkers alone."""
    room = path.parts[0].removesuffix(".py")
    parents = ("django_redlock", *path.parent.parts)
    tree = parsed(source)
    typing = {id(node) for branch in ast.walk(tree) if is_for_type_checkers(branch) for node in ast.walk(branch)}
    for node in ast.walk(tree):
        for name in imported_names(node, parents):
            yield Import(str(path), room, name, id(node) not in typing)


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


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


@cache
def sources() -> dict[Path, str]:
    """Return the text of every module of the package, by its path in the package."""
    return {file.relative_to(PACKAGE): file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    return {str(path): parsed(source) for path, source in sources().items()}


@pytest.fixture(scope="module")
@cache
def imports() -> list[Import]:
    return [found for path, source in sources().items() for found in imports_in(source, path)]


def module_of(path: str) -> str:
    """Return the name of a module within the package, such as ``core.rules``; empty for the package itself."""
    return ".".join(Path(path).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def dependencies(imports: list[Import]) -> dict[str, set[str]]:
    """Return which module of the package imports which others."""
    modules = {module_of(str(path)) for path in sources()}
    found: dict[str, set[str]] = {module: set() for module in modules}
    for each in imports:
        if each.top == "django_redlock":
            target = each.name.partition(".")[2]
            while target not in modules:  # the import is in a module, or is one
                target = target.rpartition(".")[0]
            found[module_of(each.where)].add(target)
    return found


def circles_in(graph: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """Return the largest sets of modules in which each leads to every other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        reached[start], ahead = set(), [start]
        while ahead:
            new = graph[ahead.pop()] - reached[start]
            reached[start] |= new
            ahead += new
    rings = {tuple(sorted(other for other in reached[start] if start in reached[other])) for start in graph}
    return {ring for ring in rings if len(ring) > 1}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_imports_are_found_in_every_form():
    """The reader of imports resolves relative ones, and sees those inside functions."""
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
    """No room imports from a higher room."""
    upwards = [
        each
        for each in imports
        if each.top == "django_redlock" and each.room != "testing" and floor(each.target) > floor(each.room)
    ]

    assert [each for each in upwards if each.target != "__version__"] == []


def test_core_needs_the_standard_library_only(imports):
    """The core imports no other packages, and nothing with a clock, a socket or randomness."""
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
        ("kombu", {"celery", "contrib", "keys", "testing"}),
    ],
)
def test_libraries_are_known_in_their_rooms_only(imports, package, rooms):
    """Only the rooms that talk to a library import it."""
    assert [each for each in imports if each.top == package and each.room not in rooms] == []


def test_django_begins_at_the_settings(imports):
    """The parts that decide, vote and drive work without Django, except for the nodes that are Django's databases."""
    found = [each for each in imports if each.top == "django" and each.room in BELOW_DJANGO]

    assert [each for each in found if each.where not in OF_DJANGO] == []


def test_nothing_imports_the_test_tools(imports):
    """A production process never loads ``django_redlock.testing``."""
    assert [each for each in imports if each.target == "testing" and each.room != "testing"] == []


def test_engine_takes_time_and_watchdogs_from_its_runtime(imports):
    """No module of the engine has a clock of its own, and a simulation replaces nothing but an event loop's methods."""
    clocks = [each for each in imports if each.room == "engine" and each.name in OF_RUNTIME]
    patches = {each.where for each in imports if each.name.startswith("unittest.mock")}

    assert [each for each in clocks if each.where not in REAL_TIME] == []
    assert patches == {"testing/simulation.py"}


def test_seeded_generator_is_for_pauses_only(imports):
    """
    Users seed ``random``, so no secret, version or id comes from it: only pauses, and the virtual time of a simulation.
    """
    drawing = {each.where for each in imports if each.name.partition(".")[0] in ("random", "uuid")}

    assert drawing == {
        *("engine/manager.py", "fencing.py", "nodes/records/table.py", "testing/simulation.py"),
        "keys.py",  # imports the type UUID
    }


def test_top_level_is_public():
    """Directly in the package are only the modules that Django and users expect there."""
    top = {path.stem for path in sources() if len(path.parts) == 1}

    assert top - PUBLIC == set()


def test_circles_are_found():
    """Rings of two and of three modules are found; a module that leads into or out of a ring is not part of it."""
    graph = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"c"}, "f": {"a"}, "g": set()}

    assert circles_in(graph) == {("a", "b"), ("c", "d", "e")}


def test_modules_do_not_import_each_other(imports):
    """There are no circles of imports, including imports in functions, but not those for annotations alone."""
    assert circles_in(dependencies([each for each in imports if each.at_run_time])) == set()


def test_private_names_are_not_imported(imports):
    """No module imports a name with a leading underscore from another module of the package."""
    private = [each for each in imports if each.top == "django_redlock" and is_private(each.name.rpartition(".")[2])]

    assert private == []


def test_functions_are_short():
    """The body of a function, without its docstring, has at most 60 lines."""
    long = [
        f"{path} {node.name}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body(node) > MAX_BODY
    ]

    assert long == []


def body(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many lines a function has, without its signature and its docstring."""
    statements = node.body[ast.get_docstring(node, clean=False) is not None :]
    return (statements[-1].end_lineno or 0) - statements[0].lineno + 1 if statements else 0


PYTHON_LOCKS = {
    *("threading." + name for name in ("Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier", "Timer")),
    *("queue." + name for name in ("Queue", "LifoQueue", "PriorityQueue")),
}


def test_engine_enters_no_lock_through_python_code():
    """
    An exception from a signal handler inside such a lock would leave it held for ever; ``nodes/threads.py`` has
    the rules. Under gevent its ``new_event()`` returns the event that gevent has replaced.
    """
    found = {
        f"{path}: {ast.unparse(node.func)}"
        for path, tree in trees().items()
        if path.startswith(("engine/", "nodes/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and is_python_lock(ast.unparse(node.func))
    }

    assert found - {"nodes/threads.py: threading.Event", "nodes/threads.py: Event"} == set()


def is_python_lock(called: str) -> bool:
    """Return whether a call makes a lock that is entered through Python code, however the name was imported."""
    return not {called, f"threading.{called}", f"queue.{called}"}.isdisjoint(PYTHON_LOCKS)
