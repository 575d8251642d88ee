"""Each condition in a decision about slots matters: turn one round, and a case of the tables here fails."""

import ast
import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import ModuleType
from typing import Any

import pytest

from django_redlock.singleton import arrival, call, ending, pending
from django_redlock.singleton import driver as elsewhere

from . import test_arrival, test_call, test_ending

DECISIONS = (arrival, call, pending, ending)
TABLES = (test_arrival, test_call, test_ending)


def conditions(tree: ast.AST) -> list[Any]:
    """Return the nodes of a syntax tree that have a condition."""
    return [node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp))]


def mutants() -> Iterator[Any]:
    """Yield each function of the decisions with one condition negated, and the module or class that has it."""
    for module in DECISIONS:
        tree = ast.parse(inspect.getsource(module))
        owners = [(module, tree), *((getattr(module, n.name), n) for n in tree.body if isinstance(n, ast.ClassDef))]
        for owner, function in [
            (owner, n) for owner, part in owners for n in part.body if isinstance(n, ast.FunctionDef)
        ]:
            for number, _ in enumerate(conditions(function)):
                changed = copy.deepcopy(function)
                where = conditions(changed)[number]
                name = f"{module.__name__.rpartition('.')[2]}.{function.name}: {ast.unparse(where.test)}"
                where.test = ast.UnaryOp(ast.Not(), where.test)
                yield pytest.param(module, owner, ast.fix_missing_locations(changed), id=name[:110])


@contextmanager
def in_place(module: ModuleType, owner: Any, changed: ast.FunctionDef) -> Iterator[None]:
    """Have all modules use a changed function."""
    made: dict[str, Any] = {}
    exec(compile(ast.Module([changed], []), module.__file__ or "", "exec"), module.__dict__, made)
    right = vars(owner)[changed.name]
    places = (
        [owner]
        if isinstance(owner, type)
        else [each for each in (*DECISIONS, elsewhere, *TABLES) if vars(each).get(changed.name) is right]
    )
    for place in places:
        setattr(place, changed.name, made[changed.name])
    try:
        yield
    finally:
        for place in places:
            setattr(place, changed.name, right)


def cases() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield all tests of the tables, with their arguments."""
    for test in [each for table in TABLES for name, each in vars(table).items() if name.startswith("test_")]:
        marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
        for row in product(*([named(mark.args[0], values) for values in mark.args[1]] for mark in marks)):
            yield test, {name: value for part in row for name, value in part.items()}


def named(names: Any, values: Any) -> dict[str, Any]:
    return {names: values} if isinstance(names, str) else dict(zip(names, values, strict=True))


CASES = list(cases())


def test_tables_agree_with_the_decisions() -> None:
    """Without a change, no case fails."""
    for test, about in CASES:
        test(**about)


@pytest.mark.parametrize(("module", "owner", "changed"), list(mutants()))
def test_condition_matters(module: ModuleType, owner: Any, changed: Any) -> None:
    """A table has a case for both of its sides."""
    logging.disable()
    try:
        with in_place(module, owner, changed):
            for test, about in CASES:
                try:
                    test(**about)
                except BaseException:
                    return
    finally:
        logging.disable(logging.NOTSET)
    pytest.fail("no case fails")
