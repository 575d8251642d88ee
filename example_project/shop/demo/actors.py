"""
Actors that keep the shop busy while the demo checks itself, and remember what they saw.

Each lives in a thread: ``act()`` is called until the time has run out. Afterwards ``checks()`` compares what the actor
saw with the shop's books, which ``manage.py audit_shop`` wrote.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier, Event
from typing import Any
from urllib.parse import unquote

from django.core.management.base import CommandError

from .report import Check, Say
from .stack import PAYMENT_SECONDS, Stack
from .visitor import Answer, Visitor

CUSTOMERS = ("anna", "ben", "chen")

AT_A_KILL = "503 when a server was killed"
UNTIL_RENEWED = 2.0  # seconds after which a lock of the shop is renewed, on all servers


class Importer:
    """Asks for an import every second, while beat does the same at its own pace."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._asked = {stack.first_import}  # ids of the imports that were submitted
        self._joined: list[str] = []  # ids of the imports that were joined instead
        self._failed: list[int] = []  # other responses of the shop

    def act(self, over: Event) -> None:
        """Submit one import."""
        answer = self._stack.admin.post("import/")
        if answer.status != 202:
            self._failed.append(answer.status)
        elif (said := answer.json())["duplicate"]:
            self._joined.append(said["task"])
        else:
            self._asked.add(said["task"])
        over.wait(1.0)

    def checks(self, books: dict[str, Any]) -> Iterator[Check]:
        """Compare the submitted imports with those that ran."""
        by_beat = self._stack.processes["beat"].text().count("Sending due task import-catalogue")
        by_hand = len(self._asked) + len(self._joined)
        gaps = self._stack.nodes.gaps
        ran = {run["task_id"]: run["seconds"] for run in books["imports"]}
        took = [seconds for seconds in ran.values() if seconds is not None]
        yield Check(
            "imports submitted",
            by_beat > 0 and by_hand > 0 and not self._failed,
            f"{by_beat + by_hand} ({by_hand} by hand, {by_beat} by beat, refused {self._failed or 'none'})",
        )
        yield Check(
            "imports run, all to the end, each longer than its lease of 5 s",
            len(took) == len(ran) >= 2 and min(took) > 5 and (gaps or self._asked <= ran.keys()),
            f"{len(took)} of {len(ran)}, {min(took, default=0):.1f} to {max(took, default=0):.1f} s",
        )
        yield Check(
            "never two imports at once", not books["overlapping_imports"], f"{books['overlapping_imports'] or 'none'}"
        )
        yield Check(
            "duplicates joined the import that was there",
            len(self._joined) > 0
            and (gaps or set(self._joined) <= ran.keys())
            and len(ran) - len(self._asked) <= by_beat,
            f"{by_beat + by_hand - len(ran)} ({len(self._joined)} by hand)",
        )


class Customers:
    """Customers who click twice, and all want the same last pieces."""

    clicks = 5

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._customers = [Visitor(stack.url).log_in(name, stack.password) for name in CUSTOMERS]
        self._races: list[tuple[list[Answer], float]] = []
        self._clicks = Counter[str]()
        self._rush = Counter[str]()
        # An attempt that ended without a leader may hold the lock until its release has arrived.
        self._tolerated = {"503", "409"} if stack.nodes.gaps else set()

    def act(self, over: Event) -> None:
        """Let one customer click several times at once, and then every customer once for the same article."""
        on_shelf = {item["sku"]: item["stock"] for item in self._stack.admin.get().json()["items"] if item["stock"]}
        if on_shelf:
            self._race(max(on_shelf, key=on_shelf.__getitem__))
            self._rush_for(min(on_shelf, key=on_shelf.__getitem__))
        over.wait(0.5)

    def checks(self, books: dict[str, Any]) -> Iterator[Check]:
        """Check the responses and the stock."""
        yield Check(
            f"one checkout per customer at a time, with {self.clicks} clicks at once",
            self._clicks["sold"] > 0
            and self._clicks.keys() <= {"sold", "409", AT_A_KILL, *self._tolerated}
            and all(one_at_a_time(*race) for race in self._races),
            f"{len(self._races)} times: {listed(self._clicks)}",
        )
        yield Check(
            "customers after the same article",
            self._rush["sold"] > 0 and self._rush.keys() <= {"sold", "sold out", AT_A_KILL, *self._tolerated},
            listed(self._rush),
        )
        yield Check("stock is deliveries less orders", not books["wrong_stock"], f"{books['wrong_stock'] or 'always'}")

    def _race(self, sku: str) -> None:
        start = time.monotonic()
        answers = at_once([partial(self._customers[0].post, f"buy/{sku}/")] * self.clicks)
        self._races.append((answers, time.monotonic() - start))
        self._clicks.update(self._outcomes(answers, start))

    def _rush_for(self, sku: str) -> None:
        start = time.monotonic()
        answers = at_once([partial(customer.post, f"buy/{sku}/") for customer in self._customers])
        self._rush.update(self._outcomes(answers, start))

    def _outcomes(self, answers: Sequence[Answer], start: float) -> list[str]:
        """
        Return the results of purchases that began at *start*, with a word of its own for a 503 at the time of a kill.

        Of clicks at the same moment, one may win with the votes of three servers while two others have voted for
        another click. If one of the three ends before the lock has been renewed, the other click sees two votes for
        each, and nobody can know whether the lock is held.
        """
        struck = any(start - UNTIL_RENEWED < killed for killed in self._stack.nodes.kills)
        return [AT_A_KILL if struck and what == "503" else what for what in map(outcome, answers)]


class Operator:
    """Watches the import's lock on the admin page."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._votes = Counter[str]()

    def act(self, over: Event) -> None:
        """Check the page once."""
        for lock in self._stack.held_locks():
            if "import_catalogue" in lock.name:
                self._votes[lock.votes] += 1
        over.wait(0.5)

    def checks(self, books: dict[str, Any]) -> Iterator[Check]:
        """Check the votes that were shown."""
        nodes = self._stack.nodes
        seen = ", ".join(
            f"{votes} of {nodes.votes[0]} votes {times} times"
            for votes, times in sorted(self._votes.items(), reverse=True)
        )
        found = {int(votes) for votes in self._votes}
        yield Check("import's lock on the page", set(nodes.seen) <= found <= set(nodes.votes), seen or "never")


class Terminal:
    """Runs an operator's commands while an import runs."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._failed: dict[str, str] = {}
        self._ran: list[str] = []

    def act(self, over: Event) -> None:
        """Run each command once, the first time."""
        if not self._ran:
            self._run("check")
            self._run("redlock_doctor")
            self._run("redlock_list", "--wide", of_import=True)
            self._run("redlock_inspect", of_import=True)
        over.wait(1.0)

    def checks(self, books: dict[str, Any]) -> Iterator[Check]:
        """Check that each command showed what it should."""
        failed = "; ".join(f"{command}: {text}" for command, text in self._failed.items())
        yield Check("commands", bool(self._ran) and not failed, failed or ", ".join(self._ran) or "none")

    def _run(self, *command: str, of_import: bool = False) -> None:
        """Run a command; one that shows the import's lock again if the import ended before the command looked."""
        self._ran.append(command[0])
        for _ in range(4 if of_import or self._stack.nodes.gaps else 1):
            lock = self._stack.wait_for("the import's lock", self._lock) if of_import else ""
            name = [unquote(lock).partition("/")[2].strip("{}")] if command[0] == "redlock_inspect" else []
            try:
                text = self._stack.manage(*command, *name)
            except CommandError as error:
                text = str(error)
            else:
                if not of_import or "import_catalogue" in text:
                    self._failed.pop(command[0], None)
                    return
            self._failed[command[0]] = text

    def _lock(self) -> str | None:
        names = [lock.name for lock in self._stack.held_locks() if "import_catalogue" in lock.name]
        return names[0] if names and self._stack.import_that_will_last() else None


class Saboteur:
    """
    Kills as many servers as may be lost while an import runs, one after the other, and brings them back.

    Args:
        stack: The shop whose servers it kills.
        say: Called with a text for every action.
        until: When all nodes must be back, on the monotonic clock.
    """

    gap = 3.0  # seconds between two actions

    def __init__(self, stack: Stack, say: Say, until: float) -> None:
        self._stack = stack
        self._say = say
        self._until = until
        self._killed = 0
        self._restarted = 0
        self._struck: set[str] = set()  # the imports that were running at the time

    def act(self, over: Event) -> None:
        """Do one round, if there is time for it."""
        nodes = self._stack.nodes
        if time.monotonic() + 2 * nodes.losable * self.gap < self._until:
            victims = [(self._killed + step) % len(nodes.servers) for step in range(nodes.losable)]
            # Each wait comes first, so that the page has shown the votes of all nodes before the first is killed.
            for victim in victims:
                over.wait(self.gap)
                self._kill(victim)
            for victim in victims:
                over.wait(self.gap)
                self._restart(victim)
            over.wait(nodes.votes_after)
        over.wait(0.5)

    def checks(self, books: dict[str, Any]) -> Iterator[Check]:
        """Check how the affected imports ended."""
        ended = {run["task_id"] for run in books["imports"] if run["seconds"] is not None}
        yield Check(
            "servers killed while an import ran, and restarted; the import went on",
            0 < self._killed == self._restarted and self._struck <= ended,
            f"{self._killed} killed, {self._restarted} restarted, {len(self._struck & ended)} of "
            f"{len(self._struck)} imports went on",
        )

    def _kill(self, victim: int) -> None:
        run = self._stack.wait_for("an import to run", self._stack.import_that_will_last)
        nodes = self._stack.nodes
        server = nodes.servers[victim]
        pid = server.pid
        server.kill()
        nodes.kills.append(time.monotonic())
        self._killed += 1
        self._struck.add(run["task_id"])
        alive = f"{sum(one.running for one in nodes.servers)} of {len(nodes.servers)}"
        self._say(f"{nodes.call}-{victim + 1} (pid {pid}) killed in the middle of an import; {alive} left")

    def _restart(self, victim: int) -> None:
        nodes = self._stack.nodes
        nodes.servers[victim].restart()
        self._restarted += 1
        lost = ", empty" if nodes.empty else ""
        self._say(f"{nodes.call}-{victim + 1} restarted{lost} (pid {nodes.servers[victim].pid})")


def outcome(answer: Answer) -> str:
    """Return the result of a purchase in one word; a 409 counts only with a Retry-After."""
    if answer.status == 409 and answer.headers["Retry-After"] is None:
        return "409 without Retry-After"
    return {201: "sold", 410: "sold out"}.get(answer.status, str(answer.status))


def listed(counts: Counter[str]) -> str:
    """Return counts in words, the largest last."""
    return ", ".join(f"{count} x {what}" for what, count in reversed(counts.most_common()))


def one_at_a_time(answers: Sequence[Answer], took: float) -> bool:
    """Return whether the sales followed one another; on a busy machine a late click may lead to a sale as well."""
    return took >= PAYMENT_SECONDS * sum(answer.status == 201 for answer in answers)


def at_once(visits: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """Make all visits at the same moment, each from a thread of its own; return the responses."""
    barrier = Barrier(len(visits))

    def visit(go: Callable[[], Answer]) -> Answer:
        barrier.wait()
        return go()

    with ThreadPoolExecutor(len(visits)) as pool:
        return list(pool.map(visit, visits))
