"""
Which lines of the engine the sweep interrupts, and why it leaves out the others.

Every function of the engine is either interrupted at each of its lines by some scenario, or is in ``EXCUSED``.
"""

import ast
import dis
import inspect
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import django_redlock.engine

from .sweep import Sweep
from .trap import NEVER, Line, Trap

ENGINE = Path(django_redlock.engine.__file__).parent

ALONE = "it changes nothing: people and tests read it"
BEFORE = "it raises before anything is taken"
CHILD = "it runs in a forked child, before that uses a lock"
IMPORT = "it runs when the package is imported"
CLEAN_UP = "it is called in the clean-up after an interruption: --twice interrupts it"
AT_EXIT = "it runs when the interpreter ends"

EXCUSED = {
    "options.py": BEFORE,
    "options.py:<lambda>": BEFORE,
    "options.py:_check_switches": BEFORE,
    "options.py:check_switch": BEFORE,
    "options.py:check_if_taken": BEFORE,
    "options.py:check_block": BEFORE,
    "options.py:check_not_skipped": BEFORE,
    "lock.py:decorated": BEFORE,
    "lock.py:_refuse_other_objects": BEFORE,
    "lock.py:makes_generator": BEFORE,
    "lock.py:makes_coroutine": BEFORE,
    "lock.py:_is": BEFORE,
    "lock.py:_name": BEFORE,
    "lock.py:_done": "it raises for a function that is not a coroutine function and returns something to await",
    "lock.py:Block._refuse_nesting": BEFORE,
    "lock.py:Block.is_entered": ALONE,
    "lease.py:Lease.__reduce__": BEFORE,
    "lease.py:AsyncLease.__enter__": BEFORE,
    "lease.py:_refuse_second_block": BEFORE,
    "lock.py:Lock.__repr__": ALONE,
    "lock.py:Lock.__reduce__": BEFORE,
    "manager.py:LockManager.__repr__": ALONE,
    "manager.py:LockManager.survey": "operators list locks with it; it takes none",
    "manager.py:LockManager.asurvey": "operators list locks with it; it takes none",
    "manager.py:_close_all": AT_EXIT,
    "watchdog.py:Watchdog.stop": AT_EXIT,
    "watchdog.py:_end_threads": AT_EXIT,
    "reentrancy.py:forget_holdings": "tests forget with it what a context has taken",
    "connections.py:PerLoop.__len__": ALONE,
    "watchdog.py:Watchdog.running": ALONE,
    "process.py": CHILD,
    "reentrancy.py:_Thread.__init__": "it runs when a thread first takes a lock",
    "reentrancy.py:Exit.__init__": IMPORT,
    "reentrancy.py:Entries.undo": CLEAN_UP,
    "lease.py:check_callback": "it raises before the callback is added",
    "lease.py:Loss._report_later": CLEAN_UP,
    "lease.py:AsyncLoss._report_later": CLEAN_UP,
    "connections.py:ConnectionSet.__del__": CLEAN_UP,
    "driver.py:Driver.ask": CHILD,
    "driver.py:Driver.leave": CHILD,
    "lease.py:LeaseHold.abandon": CLEAN_UP,
    "lease.py:Loss.report": CLEAN_UP,
    "notifications.py:Notifications.forked": CHILD,
    "notifications.py:Listener.forked": CHILD,
}
"""What no scenario interrupts at all of its lines, and why: a file of the engine, or a function in it."""

PASSED_OVER = {
    "exiting()": "the interpreter is about to end",
    "self.hold.forked": "a forked child has the lease of its parent",
    "hold.forked": "a forked child has the lease of its parent",
}
"""Conditions whose branches are left out, and why. The clean-up ``except BaseException`` is left out as well."""

TRIVIAL = {"RESUME", "NOP", "CACHE", "LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST", "RETURN_VALUE", "COPY_FREE_VARS"}
TRIVIAL |= {"RETURN_GENERATOR", "POP_TOP", "MAKE_CELL", "CALL_INTRINSIC_1", "RERAISE"}


class Function(NamedTuple):
    """
    A function of the engine.

    Attributes:
        file: The name of its file.
        name: Its qualified name.
        lines: The numbers of its lines, and of those of the functions inside it.
    """

    file: str
    name: str
    lines: frozenset[int]

    @property
    def excuse(self) -> str:
        """Why not all of its lines are interrupted; empty if they should be."""
        return EXCUSED.get(f"{self.file}:{self.name}", EXCUSED.get(self.file, ""))


def functions() -> Iterator[Function]:
    """Yield the functions of the engine that do more than return a constant."""
    for path in sorted(ENGINE.glob("*.py")):
        found: dict[str, set[int]] = {}
        for code in inner(compile(path.read_text(), str(path), "exec")):
            operations = {instruction.opname for instruction in dis.get_instructions(code)}
            if code.co_flags & inspect.CO_OPTIMIZED and not operations <= TRIVIAL:  # not the body of a class
                found.setdefault(code.co_qualname.partition(".<locals>")[0], set()).update(lines_of(code))
        left_out = passed_over(ast.parse(path.read_text()))
        yield from (Function(path.name, name, frozenset(lines - left_out)) for name, lines in found.items())


def passed_over(tree: ast.Module) -> set[int]:
    """Return the lines that run only after an interruption, or under a condition that does not hold in the sweep."""
    found: set[int] = set()
    for node in ast.walk(tree):
        clean_up = isinstance(node, ast.ExceptHandler) and node.type and ast.unparse(node.type) == "BaseException"
        if clean_up or (isinstance(node, ast.If) and ast.unparse(node.test) in PASSED_OVER):
            assert isinstance(node, ast.ExceptHandler | ast.If)
            first = node.lineno if clean_up else node.body[0].lineno
            found.update(range(first, (node.body[-1].end_lineno or 0) + 1))
    return found


def inner(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of all functions and classes in *code*."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from inner(constant)


def lines_of(code: CodeType) -> set[int]:
    """Return the lines of a function's body. A ``continue`` is none: a signal is noticed where the loop goes on."""
    instructions = [each for each in dis.get_instructions(code) if each.opname not in ("NOP", "CACHE")]
    lines = {each.positions.lineno for each in instructions if each.positions and "JUMP_BACKWARD" not in each.opname}
    lines = {line for line in lines if line}
    return lines - {code.co_firstlineno} if len(lines) > 1 else lines


class Reach:
    """The lines of the engine that were run, in any thread, and those at which a trap could have raised."""

    def __init__(self) -> None:
        self.run: set[Line] = set()
        self.points: set[Line] = set()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Note the lines that are run in the block, in this thread and in those that are started there."""
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def add(self, sweep: Sweep) -> None:
        """Run a scenario without an interruption, and note what it reaches."""
        sweep.rehearse(whole := Trap(NEVER, lines=True, opcodes=False))
        self.points |= whole.passages.keys() | whole.spared

    def missing(self, function: Function, lines: Iterable[Line]) -> list[int]:
        """Return the lines of a function that are not among *lines*."""
        file = str(ENGINE / function.file)
        return sorted(line for line in function.lines if (file, line) not in lines)

    def report(self) -> list[str]:
        """Print what was not interrupted, by file; return the functions of these that have no excuse."""
        every, unexcused, shown = list(functions()), [], ""
        for function in every:
            missing, unseen = self.missing(function, self.points), self.missing(function, self.run | self.points)
            if not missing:
                continue
            if function.file != shown:
                shown = function.file
                print(shown)
            what = f"not run: {listed(unseen)}" if unseen else ""
            behind = f"run, but never in an interrupted thread: {listed(set(missing) - set(unseen))}"
            print(f"    {function.name}: {'; '.join(filter(None, (what, behind if missing != unseen else '')))}")
            print(f"        {function.excuse or 'NO EXCUSE'}")
            if not function.excuse:
                unexcused.append(f"{function.file}:{function.name}")
        known = {f"{function.file}:{function.name}" for function in every} | {function.file for function in every}
        unexcused += [f"{excused} (is no longer there)" for excused in EXCUSED if excused not in known]
        self._sum_up(every)
        return unexcused

    def _sum_up(self, every: list[Function]) -> None:
        lines = {(str(ENGINE / function.file), line) for function in every for line in function.lines}
        excused = {(str(ENGINE / each.file), line) for each in every if each.excuse for line in each.lines}
        points = lines & self.points
        print(
            f"{len(lines)} lines in {len(every)} functions; {len(lines & (self.run | self.points))} were run, "
            f"{len(points)} are points of the sweep, {len((lines - points) & excused)} others are excused"
        )

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._on_line if frame.f_code.co_filename.startswith(str(ENGINE)) else None

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.run.add((frame.f_code.co_filename, frame.f_lineno))
        return self._on_line


def listed(lines: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(lines)))
