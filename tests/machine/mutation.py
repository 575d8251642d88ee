"""Deliberately wrong protocols, and the hunt for them. An oracle that never fails proves nothing."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

Wrong = Callable[[Any], Any]
"""Makes the wrong function of the right one."""


def always(value: Any) -> Wrong:
    return lambda right: value


def returns(value: Any) -> Wrong:
    return lambda right: lambda *args, **options: value


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong protocol: it replaces functions of production for as long as its context lasts."""

    name: str  # what is wrong with it
    haunts: tuple[str, ...]  # the profiles and scenarios in which it must show
    target: tuple[Any, str]  # what is replaced: an object, and the name of its attribute
    wrong: Wrong  # makes the replacement
    also: tuple[tuple[Any, str, Wrong], ...] = ()  # further replacements

    @contextmanager
    def change(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, wrong in ((*self.target, self.wrong), *self.also):
                stack.enter_context(patch.object(owner, name, wrong(getattr(owner, name))))
            yield


@dataclass(frozen=True, slots=True)
class Kill:
    """What an oracle said about something wrong, and after how many schedules; None if none objected."""

    name: str
    what: str | None
    schedules: int


def hunt(mutant: Any, objection: Callable[[Any, int], str | None], enough: int) -> Kill:
    """Run schedules of the haunts of something wrong, one seed after the other, until an oracle objects."""
    done = 0
    with mutant.change():
        for seed in range(enough):
            for haunt in mutant.haunts:
                done += 1
                if what := objection(haunt, seed):
                    return Kill(mutant.name, what, done)
    return Kill(mutant.name, None, done)


def score(kills: list[Kill]) -> str:
    lines = [f"{kill.schedules:>5}  {kill.name}  <- {kill.what or 'NOTHING'}" for kill in kills]
    return "\n".join([*lines, f"found {sum(kill.what is not None for kill in kills)} of {len(kills)}"])
