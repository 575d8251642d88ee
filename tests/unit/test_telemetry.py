"""Signals, the logger, Prometheus, OpenTelemetry and a health check, over real servers."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.conf import settings
from django.test import AsyncRequestFactory, override_settings

from django_redlock import LockLostError, LockTakenError, QuorumUnavailableError, celery, lock, locks, signals
from django_redlock.contrib.telemetry import template
from django_redlock.exceptions import EXPLANATIONS
from django_redlock.inventory import ask_to_stop, find_lock, force_release
from django_redlock.testing import Servers
from tests.held import only_together
from tests.waiting import wait_until

prometheus_client = pytest.importorskip("prometheus_client", reason="needs prometheus-client")
pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")
health_check = pytest.importorskip("health_check", reason="needs django-health-check")

from opentelemetry import metrics, trace  # noqa: E402
from opentelemetry.sdk.metrics import MeterProvider  # noqa: E402
from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

from django_redlock.contrib import opentelemetry as otel  # noqa: E402
from django_redlock.contrib import prometheus  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def three(nodes: Servers) -> Iterator[Servers]:
    """Three real servers with names under the default alias."""
    urls = [{"URL": url, "NAME": f"lock-{place}"} for place, url in enumerate(nodes.urls[:3], 1)]
    with override_settings(
        REDLOCK={"default": {"NODES": urls, "OPTIONS": {"restart_guard": False, "node_timeout": 1.0}}}
    ):
        yield nodes


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("orders:7", "orders:*"),
        ("task:shop.import:user=7", "task:shop.import:*"),
        ("6ba7b810-9dad-11d1-80b4-00c04fd430c8", "N"),
        ("x" * 5000, "x" * 100),
        ("alice@example.com", "*"),
        ("view:order:7", "view:order:*"),
        ("user/alice/profile", "user/*"),
        ("report-xNfQNzK", "report-N"),
        ("NightlyReport2.sync_all", "NightlyReportN.sync_all"),
        ("z" * 5000 + "X/export", "N/*"),  # in linear time
    ],
)
def test_names_are_labelled_by_their_template(name, label):
    """The part of a name that identifies one order or user is in no label."""
    assert template(name) == label


def test_nodes_that_go_and_come_are_reported_once(three, caplog):
    """A node that stops answering causes one signal and one warning, however many locks notice; so does its return."""
    caplog.set_level(logging.INFO, "django_redlock")
    heard: list[tuple[Any, str]] = []

    def hear(signal: Any, node: str, **about: Any) -> None:
        heard.append((signal, node))

    for signal in (signals.node_down, signals.node_up):
        signal.connect(hear)
    try:
        lock("a").acquire().release()
        three[1].kill()
        for _ in range(5):
            lock("a").acquire().release()
        three[1].start()
        while (signals.node_up, "lock-2") not in heard:
            lock("a").acquire().release()
    finally:
        for signal in (signals.node_down, signals.node_up):
            signal.disconnect(hear)

    assert heard == [(signals.node_down, "lock-2"), (signals.node_up, "lock-2")]
    said = [(record.event, record.levelname) for record in caplog.records if hasattr(record, "event")]
    assert said == [("node_down", "WARNING"), ("node_up", "INFO")]


# Prometheus


@pytest.fixture
def registry() -> Iterator[Any]:
    registry = prometheus_client.CollectorRegistry()
    prometheus.install(registry)
    yield registry
    prometheus.uninstall()


def test_every_way_to_lose_a_lock_is_counted():
    """A lock that ended for any reason but its release counts as lost; a scrape shows one that an operator took."""
    assert {*prometheus.LOSSES} == {*EXPLANATIONS} - {"forked", "margin", "released"}


@pytest.mark.parametrize("successor", [True, False])
def test_loss_that_the_release_finds_is_counted_once_and_by_its_reason(three, registry, caplog, successor):
    """The metrics give the reason that the error gives, and count no second loss when somebody asks the lease later."""
    with pytest.raises(LockLostError) as lost, lock("orders:7") as lease:  # noqa: PT012
        force_release("orders:7", find_lock("orders:7").fingerprint)
        if successor:
            other = lock("orders:7").acquire()
    assert not lease.valid()
    if successor:
        other.release()

    counted = [
        (sample.name, sample.labels["outcome"])
        for metric in registry.collect()
        for sample in metric.samples
        if sample.value and sample.name in ("redlock_hold_seconds_count", "redlock_lost_total")
    ]
    reason = "superseded" if successor else "revoked"
    assert lost.value.reason == reason
    assert [found for found in counted if found[1] != "released"] == [
        ("redlock_hold_seconds_count", reason),
        ("redlock_lost_total", reason),
    ]
    assert [record for record in caplog.records if getattr(record, "event", "") == "lock_lost"] == []


@pytest.mark.parametrize("signal", [signals.lock_acquired, celery.singleton_lost])
def test_receiver_that_nothing_could_await_is_refused(signal):
    """Signals are sent in threads and event loops alike, and the sender waits in neither."""

    async def hear(**about: Any) -> None: ...

    class Hearer:
        async def __call__(self, **about: Any) -> None: ...

    for receiver in (hear, Hearer()):
        with pytest.raises(TypeError, match=r"[hH]ear.* is a coroutine function.* Connect a plain function"):
            signal.connect(receiver)


def test_a_prometheus_scrape(three, registry):
    """It has waits and holds by template and outcome, held locks by state, and the nodes that answer."""
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    try:
        lease = lock("orders:7").acquire()
        with pytest.raises(LockTakenError):
            lock("orders:7", wait=0).acquire()
        lock("reports:1").acquire().release()
        held = lock("reports:2", renew=False).acquire()
        force_release("reports:2", find_lock("reports:2").fingerprint)
        held.extend()
        three[2].kill()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        text = urllib.request.urlopen(url, timeout=30).read().decode()
        lease.release()
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)

    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[:1] != "#"}
    assert values['redlock_wait_seconds_count{alias="default",lock="orders:*",outcome="acquired"}'] == 1
    assert values['redlock_wait_seconds_count{alias="default",lock="orders:*",outcome="taken"}'] == 1
    assert values['redlock_hold_seconds_count{alias="default",lock="reports:*",outcome="released"}'] == 1
    assert values['redlock_hold_seconds_count{alias="default",lock="reports:*",outcome="revoked"}'] == 1
    assert values['redlock_lost_total{alias="default",lock="reports:*",outcome="revoked"}'] == 1
    assert values['redlock_lost_total{alias="default",lock="orders:*",outcome="expired"}'] == 0  # and not absent
    assert values['redlock_forced_total{alias="default",outcome="released"}'] == 1
    assert values['redlock_held_locks{alias="default",state="degraded"}'] == 1
    assert values['redlock_node_up{alias="default",node="lock-1"}'] == 1
    assert values['redlock_node_up{alias="default",node="lock-3"}'] == 0
    assert values['redlock_spare_nodes{alias="default"}'] == 0
    assert "orders:7" not in text


def test_a_scrape_shows_who_still_waits(three, registry):
    """The gauge has the longest wait by template, also for permits; without waiters, it is absent."""

    def waiting() -> dict[str, float]:
        metrics = {metric.name: metric for metric in registry.collect()}
        return {sample.labels["lock"]: sample.value for sample in metrics["redlock_waiting_seconds"].samples}

    holders = [lock("orders:7").acquire(), *(lock("reports:1", limit=2).acquire() for _ in range(2))]
    holders.append(lock("free").acquire())
    threads = [
        threading.Thread(target=lambda name=name, how=how: lock(name, wait=60, **how).acquire().release())
        for name, how in (("orders:7", {}), ("reports:1", {"limit": 2}))
    ]
    assert waiting() == {}
    for thread in threads:
        thread.start()
    wait_until(lambda: len(waiting()) == 2)
    shown = waiting()
    for lease in holders:
        lease.release()
    for thread in threads:
        thread.join()

    assert (shown.keys(), min(shown.values()) > 0, max(shown.values()) < 60) == ({"orders:*", "reports:*"}, True, True)
    assert waiting() == {}


def test_an_alias_in_trouble_hides_nothing(three, registry):
    """A wrong alias has no node to spare and does not affect others; without a quorum there is no number of locks."""
    with override_settings(REDLOCK={**settings.REDLOCK, "typo": {"NODES": ["htp://a"]}}):
        text = prometheus_client.generate_latest(registry).decode()
    for server in three[:2]:
        server.kill()
    with pytest.raises(QuorumUnavailableError):
        lock("a", wait=0).acquire()
    unknown = prometheus_client.generate_latest(registry).decode()

    assert 'redlock_spare_nodes{alias="typo"} -1.0' in text
    assert 'redlock_spare_nodes{alias="default"} 1.0' in text
    assert 'redlock_node_up{alias="default",node="lock-1"} 1.0' in text
    assert "redlock_held_locks{" not in unknown
    assert 'redlock_spare_nodes{alias="default"} -1.0' in unknown
    assert 'outcome="no_quorum"' in unknown


def test_a_scrape_asks_all_aliases_at_once(registry, monkeypatch):
    """Silent nodes of many aliases are waited for only once, and not for longer than Prometheus waits for a scrape."""
    names = {"default", "other", "third"}
    only_together(monkeypatch, len(names))
    with override_settings(REDLOCK={name: {"NODES": ["memory://a"], "KEY_PREFIX": name} for name in names}):
        metrics = {metric.name: metric for metric in registry.collect()}

    assert {sample.labels["alias"] for sample in metrics["redlock_spare_nodes"].samples} == names


def test_metrics_are_installed_as_often_as_the_apps_are_ready():
    """Installed again in the same registry, the metrics stay; in another registry they appear, and leave the first."""
    first, second = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    sample = "redlock_wait_seconds_count", {"alias": "default", "lock": "orders:*", "outcome": "acquired"}
    try:
        with override_settings(REDLOCK={"default": {"NODES": ["memory://a"]}}):
            for registry in (first, first, second, first):
                prometheus.install(registry)
                lock("orders:7").acquire().release()
        counts = [registry.get_sample_value(*sample) for registry in (first, second)]
    finally:
        prometheus.uninstall()

    assert counts == [1, None]
    assert not first._names_to_collectors


WITH_FILES = """
from django.conf import settings
settings.configure(REDLOCK={})
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from django_redlock.contrib import prometheus, telemetry

telemetry.MAX_LABELS = 0
prometheus.install(own := CollectorRegistry())
prometheus._installed[-1][1]._labels.of("orders:7")
multiprocess.MultiProcessCollector(exported := CollectorRegistry())
print(*[b"redlock_unlabelled 1.0" in generate_latest(own), b"unlabelled" in generate_latest(exported)])
"""


@pytest.mark.server
def test_multiprocess_mode_reports_no_gauge_that_stays_at_0(tmp_path):
    """Its files have no place for a number that a function returns; the process itself reports the number."""
    surroundings = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    ran = subprocess.run([sys.executable, "-c", WITH_FILES], env=surroundings, capture_output=True, text=True)

    assert ran.stdout.split() == ["True", "False"], ran.stderr


def test_the_app_installs_the_metrics():
    """In INSTALLED_APPS the app registers its metrics once the apps are ready, without a request to a node."""
    installed = [*settings.INSTALLED_APPS, "django_redlock.contrib.prometheus"]
    with override_settings(REDLOCK={"default": {"NODES": ["redis://127.0.0.1:1"]}}, INSTALLED_APPS=installed):
        assert apps.get_app_config("redlock_prometheus")
        assert "redlock_forced_total" in prometheus_client.REGISTRY._names_to_collectors
    prometheus.uninstall()


# OpenTelemetry


def test_an_opentelemetry_export(three):
    """Waiting and holding are spans, failed only if one gave up or lost; the name itself appears nowhere."""
    spans, reader, provider = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([reader]))
    otel.install()
    try:
        lock("kept", hold_for=60).acquire().release()
        lost = lock("lost", renew=False).acquire()
        force_release("lost", find_lock("lost").fingerprint)
        lost.release()
        with trace.get_tracer("test").start_as_current_span("request") as request:
            with lock("orders:7"):
                with pytest.raises(LockTakenError):
                    lock("orders:7", wait=0).acquire()
    finally:
        otel.uninstall()

    found = {(span.name, span.attributes.get("redlock.outcome")): span for span in spans.get_finished_spans()}
    waited = found["redlock acquire", "acquired"]
    assert waited.parent.span_id == request.get_span_context().span_id
    assert waited.attributes["redlock.lock"] == "orders:*"
    assert waited.end_time >= waited.start_time
    assert found["redlock acquire", "taken"].status.status_code.name == "ERROR"
    ends = {outcome: span.status.status_code.name for (name, outcome), span in found.items() if name == "redlock hold"}
    assert ends == {"released": "UNSET", "held": "UNSET", "revoked": "ERROR"}
    data = json.loads(reader.get_metrics_data().to_json())
    names = {metric["name"] for scope in data["resource_metrics"][0]["scope_metrics"] for metric in scope["metrics"]}
    assert {"redlock.wait", "redlock.hold"} <= names
    assert "orders:7" not in "".join(span.to_json() for span in found.values()) + json.dumps(data)


# django-health-check


@pytest.mark.asyncio
async def test_a_health_check(three):
    """With all nodes the check passes; with none to spare, or without a quorum, it fails, in words alone."""

    async def asked() -> tuple[int, str]:
        from health_check.views import HealthCheckView

        view = HealthCheckView.as_view(checks=[("django_redlock.contrib.health.Redlock", {"spare": 1})])
        request = AsyncRequestFactory().get("/health/", headers={"accept": "application/json"})
        response = await view(request)
        return response.status_code, response.content.decode()

    answers = [await asked()]
    three[2].kill()
    answers.append(await asked())
    three[1].kill()
    answers.append(await asked())
    await locks["default"].aclose()
    with override_settings(REDLOCK={"default": {"NODES": []}}):
        answers.append(await asked())

    assert [status for status, _ in answers] == [200, 500, 500, 500]
    assert "2 of 3 nodes answer; 2 needed. None of them may fail." in answers[1][1]
    assert "1 of 3 nodes answer; 2 needed." in answers[2][1]
    assert "127.0.0.1" not in answers[2][1]
    assert "redlock.E003" in answers[3][1]


# The documented dashboard and alerts


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_there_are(three, registry):
    """Every metric in the Grafana dashboard and in the alert rules is part of a scrape."""
    lock("a").acquire().release()
    with pytest.raises(LockTakenError):
        with lock("a"):
            lock("a", wait=0).acquire()
    scraped = set(re.findall(r"^(?:# TYPE )?(redlock_\w+)", prometheus_client.generate_latest(registry).decode(), re.M))
    offered = (DOCS / "monitoring" / "grafana.json").read_text() + (DOCS / "monitoring" / "alerts.yml").read_text()

    json.loads((DOCS / "monitoring" / "grafana.json").read_text())
    asked = set(re.findall(r"\bredlock_\w+", offered))
    commands = {"redlock_doctor", "redlock_clear", "redlock_list"}
    assert asked - commands - scraped == set()
    assert len(asked) >= 6


def test_the_dashboard_counts_what_was_lost_and_what_was_taken_away(three, registry):
    """Neither an orderly end with a minimum hold nor a request to stop is counted, and a forced release is, as both."""

    def counted(part: str) -> list[dict[str, str]]:
        """Return the labels of the counters above 0 that the panel asks for whose title has this part."""
        panels = json.loads((DOCS / "monitoring" / "grafana.json").read_text())["panels"]
        [panel] = [panel for panel in panels if part in panel["title"]]
        asked = panel["targets"][0]["expr"].replace("$alias", ".*")
        [(metric, selector)] = re.findall(r"(redlock_\w+){(.*?)}", asked)
        conditions = re.findall(r'(\w+)(=~?|!~)"(.*?)"', selector)
        return [
            sample.labels
            for family in registry.collect()
            for sample in family.samples
            if sample.name == metric and sample.value
            if all((op != "!~") == bool(re.fullmatch(value, sample.labels[label])) for label, op, value in conditions)
        ]

    lock("kept", hold_for=60).acquire().release()
    with lock("busy"):
        ask_to_stop("busy", find_lock("busy").fingerprint)
        assert (counted("lost"), counted("took away")) == ([], [])
    taken = lock("taken", renew=False).acquire()
    force_release("taken", find_lock("taken").fingerprint)
    taken.extend()

    assert [(labels["lock"], labels["outcome"]) for labels in counted("lost")] == [("taken", "revoked")]
    assert [labels["outcome"] for labels in counted("took away")] == ["released"]
