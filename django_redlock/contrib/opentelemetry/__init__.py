"""
Traces and metrics for OpenTelemetry: put ``django_redlock.contrib.opentelemetry`` into ``INSTALLED_APPS``.

The app needs only the API; the project's SDK decides where the data go. Each wait for a lock and each hold is a span
of its own, a child of the current span. Spans name locks by their template, never by the name itself.
"""

import time
from typing import Any

from ...core.protocol import Outcome
from ...exceptions import missing_extra
from ..telemetry import Labels, end_of, listen, outcome_of, unlisten

try:
    from opentelemetry import metrics, trace
    from opentelemetry.trace import SpanKind, Status, StatusCode
except ModuleNotFoundError as error:
    raise missing_extra(error, "otel") from None

UID = "opentelemetry"
NAME = "django_redlock"


def install() -> None:
    """Report every lock to OpenTelemetry from now on."""
    tracer, meter = trace.get_tracer(NAME), metrics.get_meter(NAME)
    waits = meter.create_histogram("redlock.wait", "s", "How long it took to get a lock, or until one gave up.")
    holds = meter.create_histogram("redlock.hold", "s", "How long a lock was held.")
    forced = meter.create_counter("redlock.forced", description="Forced releases and requests to stop.")
    downs = meter.create_counter("redlock.node.down", description="How often a node stopped answering.")

    def span(name: str, seconds: float, about: dict[str, Any], failed: str = "") -> None:
        """Record an operation that has just ended, with its duration in seconds."""
        now = time.time_ns()
        begun = tracer.start_span(name, kind=SpanKind.CLIENT, attributes=about, start_time=now - round(seconds * 1e9))
        if failed:
            begun.set_status(Status(StatusCode.ERROR, failed))
        begun.end(now)

    def acquired(sender: Any, lease: Any, **rest: Any) -> None:
        about = _about(sender.alias, lease.name, "acquired")
        waits.record(lease.waited, about)
        span("redlock acquire", lease.waited, about)

    def gave_up(sender: Any, name: str, error: Any, **rest: Any) -> None:
        outcome = outcome_of(error)
        about = _about(sender.alias, name, outcome)
        waits.record(error.waited, about)
        span("redlock acquire", error.waited, about, outcome)

    def ended(sender: Any, lease: Any, outcome: str = "", **rest: Any) -> None:
        how = end_of(lease, outcome)
        about = _about(sender.alias, lease.name, how)
        holds.record(lease.held(), about)
        lost = "" if how in (Outcome.RELEASED, Outcome.HELD, Outcome.UNKNOWN) else how
        span("redlock hold", lease.held(), {**about, "redlock.extensions": lease.extensions}, lost)

    listen(
        UID,
        lock_acquired=acquired,
        lock_taken=gave_up,
        lock_released=ended,
        lock_lost=ended,
        lock_forced=lambda sender, outcome, **rest: forced.add(
            1, {"redlock.alias": sender.alias, "redlock.outcome": outcome}
        ),
        node_down=lambda sender, node, **rest: downs.add(1, {"redlock.alias": sender.alias, "redlock.node": node}),
    )


def uninstall() -> None:
    """Stop reporting."""
    unlisten(UID)


def _about(alias: str, name: str, outcome: str) -> dict[str, Any]:
    return {"redlock.alias": alias, "redlock.lock": labels.of(name), "redlock.outcome": outcome}


labels = Labels()
"""The labels of this process."""
