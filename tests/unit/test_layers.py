"""
The directions of imports: from the edges down to the exceptions, never up.

    edges -> db -> inventory -> handler, signals, conf, checks -> engine -> nodes -> core, runtime -> exceptions
"""

import ast
import sys
from collections.abc import Iterator
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


def test_imports_lead_down():
    """No room imports from a higher room."""
    upwards = [
        each
        for each in imports()
        if each.top == "django_redlock" and each.room != "testing" and floor(each.target) > floor(each.room)
    ]

    assert [each for each in upwards if each.target != "__version__"] == []


def test_core_needs_the_standard_library_only():
    """The core imports no other packages, and nothing with a clock, a socket or randomness."""
    foreign = [
        each
        for each in imports()
        if each.room == "core"
        and each.top != "django_redlock"
        and (each.top not in sys.stdlib_module_names or each.top in NOT_IN_CORE)
    ]

    assert foreign == []


@pytest.mark.parametrize(("room", "may"), [("core", {"core", "exceptions"}), ("runtime", {"runtime", "exceptions"})])
def test_what_decides_and_what_runs_know_nothing_of_each_other(room, may):
    """Neither the core nor the machinery of the process imports anything else of the package."""
    ours = [each for each in imports() if each.room == room and each.top == "django_redlock"]

    assert [each for each in ours if each.target not in may] == []


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        ("redis", {"nodes", "testing"}),
        ("celery", {"celery", "contrib", "testing"}),
        ("kombu", {"celery", "contrib", "keys", "testing"}),
        ("django_redlock.testing", {"testing"}),  # which no production process loads
    ],
)
def test_packages_are_known_in_their_rooms_only(package, rooms):
    """A package that may be absent is imported only by the rooms that are for it."""
    assert [each for each in imports() if f"{each.name}.".startswith(f"{package}.") and each.room not in rooms] == []


def test_etcd_and_zookeeper_come_in_by_a_dotted_path():
    """Nothing imports them, and they need what any kind of node needs; a checkout may lack them."""
    theirs = [
        each for each in imports() if each.where.startswith("contrib/consensus/") and each.top == "django_redlock"
    ]
    others = [each for each in imports() if each.name.startswith("django_redlock.contrib.consensus")]

    assert {each.target for each in theirs} - {"contrib"} <= {"nodes", "runtime", "core", "exceptions"}
    assert {each.name.split(".")[2] for each in theirs if each.target == "contrib"} <= {"consensus"}
    assert [each for each in others if each not in theirs] == []


def test_django_begins_at_the_settings():
    """The parts that decide, vote and drive work without Django, except for the nodes that are Django's databases."""
    found = [each for each in imports() if each.top == "django" and each.room in BELOW_DJANGO]

    assert [each for each in found if each.where not in OF_DJANGO] == []


def test_engine_takes_time_and_watchdogs_from_its_runtime():
    """No module of the engine has a clock of its own, and a simulation replaces nothing but an event loop's methods."""
    clocks = [each for each in imports() if each.room == "engine" and each.name in OF_RUNTIME]
    patches = {each.where for each in imports() if each.name.startswith("unittest.mock")}

    assert [each for each in clocks if each.where not in REAL_TIME] == []
    assert patches == {"testing/simulation.py"}


def test_seeded_generator_is_for_pauses_only():
    """Users seed ``random``, so only pauses come from it, and what a simulation or the contract of nodes tries."""
    drawing = {each.where for each in imports() if each.top in ("random", "uuid")}

    assert drawing == {
        *("engine/watchdog.py", "fencing.py", "nodes/records/table.py"),
        *("testing/contract.py", "testing/simulation.py"),
        "keys/view.py",  # imports the type UUID
    }


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


# The decisions about singletons. They may log, as the core may not.
DECISIONS = {
    f"singleton/{name}.py"
    for name in ("ticket", "slot", "line", "questions", "options", "call", "arrival", "pending", "ending")
}
NOT_IN_DECISIONS = NOT_IN_CORE - {"logging"}


def test_singletons_decide_without_io():
    """What decides about calls and messages imports the core, exceptions and the standard library alone."""
    own = tuple(f"django_redlock.singleton.{Path(path).stem}." for path in DECISIONS)
    foreign = [
        each
        for each in imports()
        if each.where in DECISIONS
        and each.at_run_time
        and not each.name.startswith(own)
        and not (each.top == "django_redlock" and each.target in ("core", "exceptions"))
        and (each.top not in sys.stdlib_module_names or each.top in NOT_IN_DECISIONS)
    ]

    assert trees().keys() >= DECISIONS
    assert foreign == []
