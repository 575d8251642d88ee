"""Wrong protocols of a replicated store: of its records, and of the clock of its leader."""

from typing import Any

from django_redlock.contrib.consensus.clock import EraClock
from django_redlock.contrib.consensus.etcd import node as etcd
from django_redlock.contrib.consensus.etcd.node import EtcdTable
from django_redlock.nodes.records import record as records
from django_redlock.nodes.records.record import Moment
from tests.machine.mutation import Mutant, always, returns

LEADERS = ("leaders", "leaders apart")


def writes_over_others(right: Any) -> Any:
    return lambda self, compared, values: right(self, [one for one in compared if one[0] == self._clock_key], values)


OF_STORES = (
    Mutant(
        "times of an earlier leader's clock are compared with the present leader's clock",
        ("leaders apart", "leader dies with the holder"),
        (records, "in_present_era"),
        always(lambda record, moment: record),
    ),
    Mutant(
        "a new leader does not begin a new era",
        LEADERS,
        (etcd, "era_name"),
        always(lambda header, source: f"{header.cluster:x}.{source}"),
    ),
    Mutant(
        "a hold ends at the least time that the clock may show, and is free after the greatest",
        LEADERS,
        (EraClock, "bounds"),
        lambda right: lambda self: right(self)[::-1],
    ),
    Mutant(
        "a leader that does not count yet, or not any more, is believed when it says that a lease never ends",
        LEADERS,
        (etcd, "plausible"),
        returns(True),
        also=((EraClock, "check", returns(True)),),  # records written later than that would give it away
    ),
    Mutant(
        "a record is written although another process has changed it since it was read",
        LEADERS,
        (EtcdTable, "_txn"),
        writes_over_others,
    ),
    Mutant(
        "a hold is not lengthened by the uncertainty about the leader's clock", LEADERS, (Moment, "margin"), always(0.0)
    ),
)
