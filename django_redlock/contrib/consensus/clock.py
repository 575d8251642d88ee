"""
Time on the clock of a replicated store, whose leader may change (internal).

A hold must end at one moment for all processes, so it is measured by one clock: that of the store's leader. A process
cannot read that clock at the moment at which it decides. It knows bounds for it: the clock was read between the sending
of a request and the arrival of its reply, and no clock gains or loses more than ``RATE``. A hold is written to end at
the upper bound plus its ttl, and counts as ended only when the lower bound has passed that end. The holder counts its
own deadline from before its request was sent, so its deadline falls no later than the end of the record.

Another leader has another clock: a new *era* begins. The rest of a hold cannot be converted from one clock to the
other. So the whole time that was left when its record was written counts from the beginning of the new era. Three rules
make this safe:

- The store has one record of the present era, and every write compares it. So no hold of an earlier era is written
  after the record of the new era.
- The beginning of an era is a reading of its clock that was taken after its record was written. It is added to that
  record, so that all processes count from the same moment. No hold of an earlier era was written after it.
- A write counts as a vote only if its reply shows that the leader is still that of the era. Otherwise its outcome is
  unknown. So a deposed leader, whose clock may have stood still, gives no votes.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ...core.node_state.records import moment as moment_of
from ...nodes.records.record import Moment
from ...runtime.clock import Clock, steady

RATE = 0.001
"""Seconds by which two clocks may drift apart in a second; NTP slews half of that."""

UNNOTICED = 0.01
"""Seconds by which a reading may contradict the bounds before the clock counts as set."""


class Era(NamedTuple):
    """
    The record of the present era, which all processes share.

    Args:
        name: Identifies the leader; another leader, or the same one elected again, has another name.
        turn: How often the clock of this leader is known to have been set to another time.
        first: The beginning of the era, a reading of its clock; None until a process has read it.
        source: Where the clock is read, such as the id of an etcd lease; empty if the store needs no source.
    """

    name: str
    turn: int = 0
    first: float | None = None
    source: str = ""

    @property
    def tag(self) -> str:
        """The mark of records that were written in this era."""
        return f"{self.name}/{self.turn}"

    @classmethod
    def load(cls, record: Mapping[str, Any]) -> "Era | None":
        """Return the era of a record; None if it cannot be one."""
        name, turn, first, source = (record.get(field) for field in cls._fields)
        if not isinstance(name, str) or not isinstance(turn, int) or not isinstance(source, str):
            return None
        return cls(name, turn, float(first) if isinstance(first, (int, float)) else None, source)

    def dump(self) -> dict[str, Any]:
        """Return the record to store."""
        return self._asdict()


class EraClock:
    """
    The readings that this process has of a store's clock; used by one thread at a time.

    Args:
        clock: Returns seconds on this machine's steady clock.
    """

    def __init__(self, clock: Clock = steady) -> None:
        self._clock = clock
        self._tag = ""
        self._low = self._high = self._at = 0.0
        self._jumped = ""  # the era whose clock was set

    def observe(self, era: Era, low: float, high: float, sent: float) -> None:
        """
        Take a reading of the clock of an era.

        Args:
            era: The era, whose leader the reading certainly comes from.
            low: The earliest time that the clock may have shown when it was read, in seconds.
            high: The latest time.
            sent: When the request was sent, on this machine's clock; the reply has just arrived.
        """
        now = self._clock()
        high += (now - sent) * (1 + RATE)
        if self._tag == era.tag:
            least, most = self.bounds()
            if low > most + UNNOTICED or high < least - UNNOTICED:
                self._jumped = era.tag
            low, high = max(low, least), min(high, most)
        self._tag, self._at = era.tag, now
        self._low, self._high = min(low, high), max(low, high)

    def bounds(self) -> tuple[float, float]:
        """Return the earliest and the latest time that the clock may show now, in seconds."""
        passed = self._clock() - self._at
        return self._low + passed * (1 - RATE), self._high + passed * (1 + RATE)

    def check(self, moment: Moment, records: Iterable[Mapping[str, Any]]) -> bool:
        """
        Return whether no record is from the future; if one is, the clock of its era was set back.

        That happens without an election if a store is restored from a backup: its first leader may have the name of an
        earlier one, and counts anew.
        """
        written = [moment_of(record.get("written")) for record in records if record.get("era") == moment.era]
        if max(filter(None, written), default=0.0) > moment.high + UNNOTICED:
            self._jumped = moment.era
        return not self.jumped(moment.era)

    def jumped(self, tag: str) -> bool:
        """Return whether the clock of an era, given by its tag, was set while it was the present one."""
        return bool(tag) and self._jumped == tag

    def knows(self, era: Era) -> bool:
        """Return whether there is a reading of the clock of an era."""
        return self._tag == era.tag

    def correction(self, known: Era | None, name: str, source: str = "") -> Era | None:
        """
        Return the content that the shared record must get before any decision; None if it is right.

        Args:
            known: The record as it was read; None if there is none.
            name: The name of the era of the present leader.
            source: Where its clock is read.
        """
        if known is None or known.name != name:
            return Era(name, source=source)
        if self.jumped(known.tag):
            # Times that were written before the jump can no longer be compared with the clock.
            return Era(name, known.turn + 1, source=source)
        if known.first is None and self.knows(known):
            return known._replace(first=self.bounds()[1])
        return None

    def moment(self, era: Era) -> Moment | None:
        """Return the present moment in an era; None if its clock has to be read first."""
        if era.first is None or not self.knows(era):
            return None
        return Moment(*self.bounds(), era.tag, era.first)
