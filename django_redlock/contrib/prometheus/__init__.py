"""
Metrics for Prometheus: put ``django_redlock.contrib.prometheus`` into ``INSTALLED_APPS``.

Events are counted in the process where they happen. Held locks and the state of the nodes are read from the nodes when
Prometheus scrapes, so they are correct in every process, even in one that holds no lock.
"""

from collections import Counter as Count
from collections.abc import Iterator
from math import ceil
from typing import Any

from ...conf import InvalidRedlockError
from ...core.names import queue_of
from ...core.protocol import EndReason
from ...exceptions import missing_extra
from ...handler import locks
from ..telemetry import Labels, end_of, listen, outcome_of, unlisten

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise missing_extra(error, "prometheus") from None

UID = "prometheus"
LOSSES: tuple[str, ...] = tuple(set(EndReason) - {EndReason.RELEASED, EndReason.FORKED})
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 3600)


class NodesCollector(Collector):
    """
    Report held locks and the state of the nodes; a scrape reads them in about a second at most.

    Args:
        labels: The labels of this process, which are reported as well. A gauge of their own would stay at 0 in the
            multiprocess mode of prometheus_client, which calls no function of a gauge.
    """

    def __init__(self, labels: Labels) -> None:
        self._labels = labels

    def describe(self) -> Iterator[Metric]:
        """Return nothing, so that registering the collector makes no network call."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Query the nodes of every alias."""
        from ...inventory import State, held_in_each  # only here: Django's apps must be ready
        from ...inventory.model import name_of

        held = GaugeMetricFamily("redlock_held_locks", "Locks held now, by state.", labels=["alias", "state"])
        up = GaugeMetricFamily("redlock_node_up", "Whether a node answers.", labels=["alias", "node"])
        votes = GaugeMetricFamily("redlock_node_votes", "Whether a node may vote.", labels=["alias", "node"])
        spare = GaugeMetricFamily("redlock_spare_nodes", "How many nodes may still fail.", labels=["alias"])
        text = "How long the first caller in the queue has been waiting; absent if nobody waits."
        waiting = GaugeMetricFamily("redlock_waiting_seconds", text, labels=["alias", "lock"])
        listed = GaugeMetricFamily("redlock_listing_complete", "Whether all locks were counted.", labels=["alias"])
        try:
            aliases = list(locks)
        except InvalidRedlockError:
            aliases = []
        for alias, snapshot in held_in_each(aliases).items():
            if isinstance(snapshot, InvalidRedlockError):
                spare.add_metric([alias], -1)  # with such settings no lock can be taken
                continue
            counts = Count(lock.state.value for lock in snapshot.locks)
            for state in State.values if snapshot.has_quorum else ():  # without a quorum, unknown is not 0
                held.add_metric([alias, state], counts[state])
            longest: Count[str] = Count()
            for lock in snapshot.locks:
                if lock.waiting_since:
                    name = self._labels.of(name_of(queue_of(lock.slug) or lock.slug))
                    longest[name] = max(longest[name], ceil(snapshot.taken - lock.waiting_since))
            for name, seconds in longest.items():
                waiting.add_metric([alias, name], seconds)
            for node in snapshot.nodes:
                up.add_metric([alias, node.name], node.answered)
                votes.add_metric([alias, node.name], node.votes)
            spare.add_metric([alias], snapshot.spare)
            listed.add_metric([alias], snapshot.complete and snapshot.has_quorum)
        text = "How often a lock was labelled *: too many names."
        unlabelled = GaugeMetricFamily("redlock_unlabelled", text, self._labels.rest)
        yield from (held, waiting, up, votes, spare, listed, unlabelled)


def install(registry: CollectorRegistry = REGISTRY) -> None:
    """Register the metrics and start counting; move the metrics if they were in another registry."""
    if _installed and _installed[0][0] is registry:
        return
    uninstall()
    labels = Labels()
    waits = _histogram("redlock_wait_seconds", "How long it took to get a lock, or until one gave up.", registry)
    holds = _histogram("redlock_hold_seconds", "How long a lock was held, and how that ended.", registry)
    lost = Counter("redlock_lost", "Locks that their holders lost.", ["alias", "lock", "outcome"], registry=registry)

    def acquired(sender: Any, lease: Any, **about: Any) -> None:
        name = labels.of(lease.name)
        waits.labels(sender.alias, name, "acquired").observe(lease.waited)
        for outcome in LOSSES:  # a counter that first appears with a loss shows no increase
            lost.labels(sender.alias, name, outcome)

    def gave_up(sender: Any, name: str, error: Any, **about: Any) -> None:
        waits.labels(sender.alias, labels.of(name), outcome_of(error)).observe(error.waited)

    def ended(sender: Any, lease: Any, outcome: str = "", **about: Any) -> None:
        name, how = labels.of(lease.name), end_of(lease, outcome)
        holds.labels(sender.alias, name, how).observe(lease.held())
        if how in LOSSES:
            lost.labels(sender.alias, name, how).inc()

    forced = Counter("redlock_forced", "Forced releases and requests to stop.", ["alias", "outcome"], registry=registry)
    downs = Counter("redlock_node_down", "How often a node stopped answering.", ["alias", "node"], registry=registry)
    listen(
        UID,
        lock_acquired=acquired,
        lock_taken=gave_up,
        lock_released=ended,
        lock_lost=ended,
        lock_forced=lambda sender, outcome, **about: forced.labels(sender.alias, outcome).inc(),
        node_down=lambda sender, node, **about: downs.labels(sender.alias, node).inc(),
    )
    nodes = NodesCollector(labels)
    registry.register(nodes)
    _installed.extend((registry, collector) for collector in (waits, holds, lost, forced, downs, nodes))


def _histogram(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, text, ["alias", "lock", "outcome"], buckets=BUCKETS, registry=registry)


def uninstall() -> None:
    """Stop counting, and remove the metrics from their registry."""
    unlisten(UID)
    while _installed:
        registry, collector = _installed.pop()
        registry.unregister(collector)


_installed: list[tuple[CollectorRegistry, Collector]] = []
