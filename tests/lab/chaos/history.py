"""The workers' records, with the times of the machine's steady clock, and what must hold for them."""

import json
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path


@dataclass
class Hold:
    """One acquisition; times in seconds on the machine's steady clock."""

    token: int
    began: float  # when the worker requested the lock
    since: float  # from when on it considered the lock its own
    deadline: float  # when that ended at the latest, by its own clock
    until: float = float("inf")  # when it ended, if earlier: by a release, or with the process
    killed: float = float("inf")  # when it was killed with the lock in its hands

    @property
    def end(self) -> float:
        return min(self.until, self.deadline)


@dataclass
class History:
    """All that the workers did."""

    holds: list[Hold] = field(default_factory=list)
    failed: int = 0
    stale: int = 0
    lost: int = 0
    done: Counter[str] = field(default_factory=Counter)

    def read(self, path: Path, killed: float) -> None:
        """Add the records of one worker; *killed* is when it was killed, infinity if it was not."""
        hold: Hold | None = None
        for line in path.read_text().splitlines():
            event, *values = json.loads(line)
            match event:
                case "held":
                    hold = Hold(*values, until=killed, killed=killed)
                    self.holds.append(hold)
                case "longer" if hold:
                    hold.deadline = max(hold.deadline, *values)
                case "ends" if hold:
                    hold.until, hold.killed = min(hold.until, *values), float("inf")
                case "failed":
                    self.failed += 1
                case "stale":
                    self.stale += 1
                case "lost":
                    self.lost += 1
                case "done":
                    self.done[values[0]] += 1

    def overlaps(self) -> list[tuple[Hold, Hold]]:
        """Return the pairs of holders that both considered the lock theirs at the same time, in order of time."""
        believed = sorted((hold for hold in self.holds if hold.since < hold.end), key=lambda hold: hold.since)
        longest = accumulate(believed, lambda before, after: max(before, after, key=lambda hold: hold.end))
        return [
            (before, after) for before, after in zip(longest, believed[1:], strict=False) if after.since < before.end
        ]

    def freed(self) -> list[float]:
        """Return how many seconds after the deadline of each holder that was killed the next one had the lock."""
        given = sorted(self.holds, key=lambda hold: hold.since)
        return [after.since - hold.deadline for hold, after in pairwise(given) if hold.killed < hold.deadline]

    def wrong_tokens(self) -> list[int]:
        """Return the tokens that are not unique, or not above all that had been granted before their requests."""
        found = [token for token, times in Counter(hold.token for hold in self.holds).items() if times > 1]
        given = sorted(self.holds, key=lambda hold: hold.since)
        times, highest = [hold.since for hold in given], list(accumulate((hold.token for hold in given), max))
        for hold in self.holds:
            before = bisect_left(times, hold.began)
            if before and highest[before - 1] >= hold.token:
                found.append(hold.token)
        return found
