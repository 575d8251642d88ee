"""The records of tasks and callers, and what must be true of them. All processes are on one machine, with one clock."""

import os
import sqlite3
import time
from collections.abc import Collection, Mapping
from pathlib import Path

TABLES = """
CREATE TABLE IF NOT EXISTS run (
    id INTEGER PRIMARY KEY, key INTEGER, task TEXT, pid INTEGER, began REAL, seen REAL, ended INTEGER DEFAULT 0,
    over REAL DEFAULT 1e12
);
CREATE TABLE IF NOT EXISTS sent (task TEXT, attempt INTEGER);
CREATE TABLE IF NOT EXISTS broker (id INTEGER PRIMARY KEY, tag TEXT, task TEXT, attempt INTEGER, event TEXT);
CREATE TABLE IF NOT EXISTS call (task TEXT, key INTEGER, at REAL, accepted INTEGER);
"""


class Records:
    """The database of one soak."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, timeout=60, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = OFF")  # processes are killed here, not the machine
        self._database.executescript(TABLES)

    def began(self, key: int, task: str) -> int:
        """Record that a body began; return the number of its run."""
        now = time.monotonic()
        run = self._database.execute(
            "INSERT INTO run (key, task, pid, began, seen) VALUES (?, ?, ?, ?, ?)", (key, task, os.getpid(), now, now)
        )
        assert run.lastrowid
        return run.lastrowid

    def seen(self, run: int, ended: bool = False) -> None:
        """Record that a body is still at work, or has finished."""
        self._database.execute("UPDATE run SET seen = ?, ended = ? WHERE id = ?", (time.monotonic(), ended, run))

    def over(self, task: str) -> None:
        """Record that the run of a task in this process is over, and has freed its slot."""
        self._database.execute(
            "UPDATE run SET over = ? WHERE id = (SELECT MAX(id) FROM run WHERE task = ? AND pid = ?)",
            (time.monotonic(), task, os.getpid()),
        )

    def sent(self, task: str, attempt: int) -> None:
        """Record that the broker has got the message of one attempt of a task; 0 is the first."""
        self._database.execute("INSERT INTO sent VALUES (?, ?)", (task, attempt))

    def broker(self, tag: str, task: str, attempt: int, event: str) -> None:
        """Record a worker's action on a message of the broker: ``noted`` or ``acknowledged``."""
        self._database.execute(
            "INSERT INTO broker (tag, task, attempt, event) VALUES (?, ?, ?, ?)", (tag, task, attempt, event)
        )

    def broker_events(self, task: str) -> dict[str, str]:
        """Return the last action on each message of the last attempt of a task."""
        rows = self._database.execute(
            "SELECT tag, event FROM broker WHERE tag IN (SELECT tag FROM broker WHERE task = ? "
            "AND attempt = (SELECT COALESCE(MAX(attempt), 0) FROM sent WHERE task = ?)) ORDER BY id",
            (task, task),
        )
        return dict(rows.fetchall())

    def never_noted(self, task: str) -> int:
        """Return how many messages of the last attempt of a task have been sent, and noted by no worker."""
        last = "task = :task AND attempt = (SELECT MAX(attempt) FROM sent WHERE task = :task)"
        sent, noted = self._database.execute(
            f"SELECT (SELECT COUNT(*) FROM sent WHERE {last}), (SELECT COUNT(DISTINCT tag) FROM broker WHERE {last})",
            {"task": task},
        ).fetchone()
        return max(0, int(sent) - int(noted))

    def called(self, key: int, task: str, accepted: bool, at: float) -> None:
        """Record the caller's result, and when the call was made."""
        self._database.execute("INSERT INTO call VALUES (?, ?, ?, ?)", (task, key, at, accepted))

    def unfinished(self) -> list[str]:
        """Return the ids of the accepted calls that no body has finished."""
        rows = self._database.execute(
            "SELECT task FROM call WHERE accepted AND task NOT IN (SELECT task FROM run WHERE ended) ORDER BY at"
        )
        return [task for (task,) in rows]

    def uncovered(self) -> list[tuple[str, int, float, bool]]:
        """
        Return the duplicates of calls of which no run ended afterwards.

        Each has that call's id, its key, its moment, and whether another run of the key ended later.
        """
        return self._database.execute(
            "SELECT task, key, at, EXISTS (SELECT 1 FROM run WHERE run.key = call.key AND ended AND over >= at) "
            "FROM call WHERE NOT accepted AND NOT EXISTS "
            "(SELECT 1 FROM run WHERE run.task = call.task AND ended AND over >= at)"
        ).fetchall()

    def last_seen(self) -> float:
        """Return when a body was last at work, on the machine's monotonic clock."""
        return float(self._database.execute("SELECT COALESCE(MAX(seen), 0) FROM run").fetchone()[0])

    def overlaps(self, limits: Mapping[int, int]) -> list[str]:
        """Return, in words, every body that began while others of its key ran that were as many as may run at once."""
        rows = self._database.execute(
            "SELECT b.key, b.task, b.pid, b.began, COUNT(*), "
            "GROUP_CONCAT(printf('%s in %d from %.2f to %.2f', a.task, a.pid, a.began, a.seen), ', ') "
            "FROM run a JOIN run b ON a.key = b.key AND a.id != b.id AND a.began <= b.began AND b.began < a.seen "
            "AND (a.began < b.began OR a.id < b.id) GROUP BY b.id"
        )
        return [
            f"key {key}: {task} in {pid} from {began:.2f}, and {others}"
            for key, task, pid, began, count, others in rows
            if count >= limits.get(key, 1)
        ]

    def idle(self, key: int, lost: Collection[str]) -> float:
        """Return the longest time in seconds for which a key had calls that waited, and no body at work."""
        first_end = "SELECT MIN(seen) FROM run WHERE run.task = call.task AND ended"
        calls = self._database.execute(f"SELECT task, at, ({first_end}) FROM call WHERE key = ?", (key,)).fetchall()
        runs = self._database.execute("SELECT began, seen FROM run WHERE key = ?", (key,)).fetchall()
        edges = [(at, 1, 0) for task, at, end in calls if end and task not in lost]
        edges += [(end, -1, 0) for task, _, end in calls if end and task not in lost]
        edges += [(began, 0, 1) for began, _ in runs] + [(seen, 0, -1) for _, seen in runs]
        longest = since = 0.0
        waiting = running = 0
        for at, more_waiting, more_running in sorted(edges):
            if waiting and not running:
                longest = max(longest, at - since)
            was_idle = waiting and not running
            waiting, running = waiting + more_waiting, running + more_running
            if not was_idle:
                since = at
        return longest

    def repeated(self) -> dict[str, list[tuple[int, float, float]]]:
        """Return the tasks whose work was done more than once: by which processes, when, and when each run was over."""
        rows = self._database.execute("SELECT task, pid, seen, over FROM run WHERE ended ORDER BY began").fetchall()
        runs: dict[str, list[tuple[int, float, float]]] = {}
        for task, *about in rows:
            runs.setdefault(task, []).append((about[0], about[1], about[2]))
        return {task: doers for task, doers in runs.items() if len(doers) > 1}

    def last_doer(self, task: str) -> int | None:
        """Return the process of the last run of a task; None if it never ran."""
        found = self._database.execute("SELECT pid FROM run WHERE task = ? ORDER BY began DESC", (task,)).fetchone()
        return found and int(found[0])

    def figures(self) -> str:
        """Return the totals in words."""
        calls, accepted = self._database.execute("SELECT COUNT(*), SUM(accepted) FROM call").fetchone()
        begun, finished = self._database.execute("SELECT COUNT(*), SUM(ended) FROM run").fetchone()
        return f"{calls} calls, {accepted} accepted; {begun} bodies begun, {finished} finished"
