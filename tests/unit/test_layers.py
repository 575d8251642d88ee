"""
The directions of imports: from the edges down to the exceptions, never up.

    edges -> db -> inventory -> handler, signals, conf, checks -> engine -> nodes -> core, runtime -> exceptions
"""

import ast
import sys
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import django_redlock
from django_redlock.core.round import Round

PACKAGE = Path(django_redlock.__file__).parent

FLOORS = [
    {"exceptions"},
    {"core", "runtime"},  # which do not know each other
    {"nodes"},
    {"engine"},
    {"checks", "conf", "handler", "routers", "signals"},
    {"inventory"},
    {"db", "frameworks", "keys", "singleton"},  # what doors such as views and tasks share; they never import a door
]
EDGE = len(FLOORS)  # everything else: admin, views, celery, checks, ...
BELOW_DJANGO = ("exceptions", "core", "runtime", "nodes", "engine")

# The nodes that are Django's databases.
OF_DJANGO = {"nodes/database/node.py", "nodes/database/table.py"}

# The core decides. Its callers do everything for which these modules would be needed.
NOT_IN_CORE = {
    *("asyncio", "logging", "random", "secrets", "select", "selectors"),
    *("socket", "ssl", "subprocess", "threading", "time"),
}

# The engine takes these from its ``Runtime``, so that a simulation can pass its own.
OF_RUNTIME = {
    *("time", "random", "django_redlock.runtime.clock.steady"),
    *(f"django_redlock.engine.watchdog.{name}" for name in ("watchdog", "loop_watchdog")),
}

# Who may import it: the runtime of real processes, with its watchdogs.
REAL_TIME = {"engine/watchdog.py"}

DRAWING = {
    *("engine/watchdog.py", "fencing.py", "nodes/records/table.py"),
    *("testing/contract.py", "testing/simulation.py"),
    "keys/view.py",  # imports the type UUID
}

# The rooms of packages that may be absent.
AT_HOME = {
    "redis": {"nodes", "testing"},
    "celery": {"celery", "contrib", "testing"},
    "kombu": {"celery", "contrib", "keys", "testing"},
    "django_redlock.testing": {"testing"},  # which no production process loads
}

# The decisions about singletons. They may log, as the core may not.
DECISIONS = {
    f"singleton/{name}.py"
    for name in ("ticket", "slot", "line", "questions", "options", "call", "arrival", "pending", "ending")
}
OF_DECISIONS = tuple(f"django_redlock.singleton.{Path(path).stem}." for path in DECISIONS)


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
    def ours(self) -> bool:
        return self.top == "django_redlock"

    @property
    def target(self) -> str:
        """The room that is imported, or "" for the package itself."""
        return self.name.split(".")[1] if "." in self.name else ""


def imports_in(path: str, tree: ast.Module) -> Iterator[Import]:
    """Yield the imports of a file of the package: at its top, in functions and for type checkers alone."""
    parts = Path(path).parts
    parents = ("django_redlock", *parts[:-1])
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    annotating = [branch for branch in branches if ast.unparse(branch.test) == "TYPE_CHECKING"]
    typing = {id(node) for branch in annotating for node in ast.walk(branch)}
    for node in ast.walk(tree):
        for name in imported_names(node, parents):
            yield Import(path, parts[0].removesuffix(".py"), name, id(node) not in typing)


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
def trees() -> dict[str, ast.Module]:
    """Return the syntax of every module of the package, by its path in the package."""
    return {str(file.relative_to(PACKAGE)): parsed(file.read_text("utf-8")) for file in PACKAGE.rglob("*.py")}


def parsed(source: str) -> ast.Module:
    """Return the syntax tree; Python before 3.11.8 loses count if another thread parses something at the same time."""
    while True:
        try:
            return ast.parse(source)
        except SystemError as error:
            if "recursion depth mismatch" not in str(error):
                raise


@cache
def imports() -> list[Import]:
    return [found for path, tree in trees().items() for found in imports_in(path, tree)]


RULES: dict[str, Callable[[Import], bool]] = {
    "No room imports from a higher room.": lambda each: (
        each.ours and each.room != "testing" and each.target != "__version__" and floor(each.target) > floor(each.room)
    ),
    "The core imports no other packages, and nothing with a clock, a socket or randomness.": lambda each: (
        each.room == "core" and not each.ours and (each.top not in sys.stdlib_module_names or each.top in NOT_IN_CORE)
    ),
    "The core imports nothing else of the package.": lambda each: (
        each.room == "core" and each.ours and each.target not in ("core", "exceptions")
    ),
    "The machinery of the process imports nothing else of the package.": lambda each: (
        each.room == "runtime" and each.ours and each.target not in ("runtime", "exceptions")
    ),
    "A package that may be absent is imported only by the rooms that are for it.": lambda each: any(
        f"{each.name}.".startswith(f"{package}.") and each.room not in rooms for package, rooms in AT_HOME.items()
    ),
    "Nothing imports etcd and ZooKeeper, which come in by a dotted path: a checkout may lack them.": lambda each: (
        each.name.startswith("django_redlock.contrib.consensus") and not each.where.startswith("contrib/consensus/")
    ),
    "Etcd and ZooKeeper need what any kind of node needs.": lambda each: (
        each.where.startswith("contrib/consensus/")
        and each.ours
        and each.target not in ("nodes", "runtime", "core", "exceptions")
        and not each.name.startswith("django_redlock.contrib.consensus")
    ),
    "What decides, votes and drives works without Django, except for its databases as nodes.": lambda each: (
        each.top == "django" and each.room in BELOW_DJANGO and each.where not in OF_DJANGO
    ),
    "No module of the engine has a clock or a watchdog of its own.": lambda each: (
        each.room == "engine" and each.name in OF_RUNTIME and each.where not in REAL_TIME
    ),
    "A simulation replaces nothing but an event loop's methods.": lambda each: (
        each.name.startswith("unittest.mock") and each.where != "testing/simulation.py"
    ),
    "Users seed random, so only pauses come from it, and what simulations and contracts of nodes try.": lambda each: (
        each.top in ("random", "uuid") and each.where not in DRAWING
    ),
    "What decides about calls and messages imports the core, exceptions and the standard library alone.": lambda each: (
        each.where in DECISIONS
        and each.at_run_time
        and not each.name.startswith(OF_DECISIONS)
        and not (each.ours and each.target in ("core", "exceptions"))
        and (each.top not in sys.stdlib_module_names or each.top in NOT_IN_CORE - {"logging"})
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_imports_obey_the_rule(rule: str):
    assert [each for each in imports() if RULES[rule](each)] == []


def test_decisions_exist():
    assert trees().keys() >= DECISIONS


def modules_imported(*, at_run_time_only: bool = False) -> dict[str, set[str]]:
    """Return the files of the package that each file imports, by their paths in the package."""
    paths = {".".join(Path("django_redlock", path).with_suffix("").parts): path for path in trees()}
    paths = {module.removesuffix(".__init__"): path for module, path in paths.items()}
    found: dict[str, set[str]] = {path: set() for path in paths.values()}
    for each in imports():
        if each.top == "django_redlock" and (each.at_run_time or not at_run_time_only):
            target = each.name
            while target not in paths:  # the import is in a module, or is one
                target = target.rpartition(".")[0]
            found[each.where] |= {paths[target]} - {each.where}
    return found


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of files that import each other, directly or through others."""

    def reached(start: str) -> set[str]:
        found, to_do = set[str](), [start]
        while to_do:
            new = graph[to_do.pop()] - found
            found |= new
            to_do += new
        return found

    reach = {path: reached(path) for path in graph}
    groups = {frozenset(other for other in reach[path] if path in reach[other]) for path in graph}
    return sorted(map(set, groups - {frozenset()}), key=sorted)


def test_modules_do_not_import_each_other():
    """There are no circles of imports, including imports in functions, but not those for annotations alone."""
    TopologicalSorter(modules_imported(at_run_time_only=True)).prepare()  # raises CycleError, which names the circle


MANAGER_AND_LEASES = {f"engine/{name}.py" for name in ("manager", "lock", "lease", "reentrancy")}
"""
A manager makes locks and leases, and extends and releases the leases; a lock enters them, and notes who is inside.

None of these can be read without the others.
"""


def test_only_a_manager_and_its_leases_know_each_other():
    """There is one circle of files, also for annotations and late imports: any other file can be read by itself."""
    assert circles(modules_imported()) == [MANAGER_AND_LEASES]


def written(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Yield the attributes that are assigned, or that are changed in place, except for those of ``self``."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                found: ast.AST = node
            case ast.Subscript(value=found, ctx=ast.Store() | ast.Del()):
                pass
            case ast.Call(func=ast.Attribute(value=found, attr="update" | "pop" | "clear" | "setdefault")):
                pass
            case _:
                continue
        if isinstance(found, ast.Attribute) and ast.unparse(found.value) != "self":
            yield found


def test_rounds_are_changed_by_themselves_only():
    """No file but that of the rounds sets a field of a round; ``Line`` has a field of the same name as one of them."""
    assigned = {
        f"{path}: {ast.unparse(attribute)}"
        for path, tree in trees().items()
        if path != "core/round.py"
        for attribute in written(tree)
        if attribute.attr in Round.__slots__
    }

    assert assigned == {"engine/rounds_async.py: line.patience"}


def test_votes_are_counted_in_one_place():
    """No other file compares a number of nodes with a quorum, or with what a quorum can spare."""
    compared = {
        path
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and path not in ("core/votes.py", "keys/task.py")  # which compares arguments
        for each in ast.walk(node)
        if (each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "")).strip("_") in ("needed", "spare")
    }

    assert compared == {
        *("contrib/health.py", "exceptions.py", "inventory/model.py"),  # for people: how many more may fail
        "inventory/node_checks.py",
    }


PYTHON_LOCKS = {
    *("Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier", "Timer"),
    *("Queue", "LifoQueue", "PriorityQueue"),
}


def test_engine_enters_no_lock_through_python_code():
    """An exception from a signal handler in it would leave it held for ever; ``runtime/threads.py`` has the rules."""
    called = {
        f"{path}: {ast.unparse(node.func).removeprefix('threading.').removeprefix('queue.')}"
        for path, tree in trees().items()
        if path.startswith(("engine/", "nodes/", "runtime/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }

    assert [each for each in called if each.rpartition(" ")[2] in PYTHON_LOCKS] == ["runtime/threads.py: Event"]
