"""The demo that checks itself: keep the shop busy, kill servers, and check the result."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, Protocol

from django.core.management.base import CommandError

from .actors import Customers, Importer, Operator, Saboteur, Terminal
from .report import Check, Say
from .stack import Stack


class Actor(Protocol):
    """An actor that repeats an action, and then reports what should have held."""

    def act(self, over: Event) -> None:
        """Act once, and pause; return soon when *over* is set."""

    def checks(self, books: dict[str, Any]) -> Iterator[Check]:
        """Return the checks, given the shop's books."""


def run(stack: Stack, seconds: float, say: Say) -> list[Check]:
    """Keep the shop busy for the given time, shut it down properly, and return the checks."""
    until = time.monotonic() + seconds
    actors: list[Actor] = [Importer(stack), Customers(stack), Operator(stack), Terminal(stack)]
    actors += [Saboteur(stack, say, until)] if stack.nodes.losable else []
    failures = live(stack, actors, until)
    say("time is up: beat stops, the last import ends")
    stack.processes["beat"].stop()
    left = locks_left(stack)
    books = json.loads(stack.manage("audit_shop", check=False))
    stack.stop()
    checks = [check for actor in actors for check in actor.checks(books)]
    return [*checks, left, *failures, logs(stack)]


def live(stack: Stack, actors: list[Actor], until: float) -> list[Check]:
    """
    Let the actors act, each in a thread, until the time has run out; return a failed check for each that broke down.
    """
    over = Event()
    with ThreadPoolExecutor(len(actors)) as pool:
        lives = {type(actor).__name__: pool.submit(_live, actor, over) for actor in actors}
        try:
            while time.monotonic() < until and not any(life.done() for life in lives.values()):
                stack.check()
                time.sleep(0.2)
        finally:
            over.set()
    errors = {name: life.exception() for name, life in lives.items()}
    return [Check(f"the {name} lived", False, repr(error)) for name, error in errors.items() if error]


def _live(actor: Actor, over: Event) -> None:
    while not over.is_set():
        actor.act(over)


def locks_left(stack: Stack) -> Check:
    """Wait until no lock is held any more, for at most the time of two imports."""
    try:
        stack.wait_for("the last lock to go", lambda: not stack.held_locks(), 2 * stack.import_seconds + 20)
    except (CommandError, ConnectionError) as error:
        return Check("locks left", False, str(error))
    return Check("locks left", True, "none")


def logs(stack: Stack) -> Check:
    """Search a log for lines that should not be there."""
    bad = {process.name: process.text().count("Traceback") for process in stack.processes.values()}
    seen = ", ".join(f"{count} in {name}.log" for name, count in bad.items() if count)
    return Check("tracebacks in the logs", not seen, seen or "none")
