"""Why a node is down is in the log and in the signal, and ``check --deploy`` finds a node that can never vote."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.core import checks
from django.test import override_settings

from django_redlock import locks, signals
from django_redlock.testing import FaultProxy, Server, Servers
from tests.managers import Flavour

USER = "ACL SETUSER worker on >sesame ~* &* +@all"


@pytest.fixture
def patient() -> Iterator[Server]:
    with Server() as server:
        yield server


STATES: dict[str, Callable[[Server, redis.Redis], object]] = {
    "refused": lambda server, client: server.kill(),
    "timeout": lambda server, client: server.freeze(),
    "is a replica": lambda server, client: client.replicaof("127.0.0.1", 1),
    "WRONGPASS": lambda server, client: client.execute_command(*USER.split()),
    "NOAUTH": lambda server, client: client.config_set("requirepass", "sesame"),
}


def harmed(server: Server, why: str) -> str:
    """Bring a server into a state, and return the URL to use."""
    with server.client() as client:
        STATES[why](server, client)
    return server.url.replace("//", "//worker:wrong@") if why == "WRONGPASS" else server.url


@pytest.mark.parametrize("why", ["refused", "WRONGPASS", "timeout"])
async def test_reason_is_logged_and_sent(
    nodes: Servers, patient: Server, flavour: Flavour, caplog: pytest.LogCaptureFixture, why: str
):
    """An operator need not guess, or read the node's log first; the text has no password, nor has the signal."""
    heard: list[tuple[str, str]] = []

    def down(sender: Any, node: str, reason: str, **about: Any) -> None:
        heard.append((node, reason))

    urls = [*nodes.urls[:2], harmed(patient, why)]
    entries = [{"URL": url, "NAME": f"lock-{place}"} for place, url in enumerate(urls)]
    options = {"ttl": 10.0, "restart_guard": False, "node_timeout": 1.5}
    signals.node_down.connect(down)
    with override_settings(REDLOCK={"default": {"NODES": entries, "OPTIONS": options}}):
        with caplog.at_level(logging.WARNING, "django_redlock"):
            while not heard:
                await flavour.release(await flavour.acquire(locks["default"].lock("a", wait=0)))
        await flavour.close(locks["default"])
    signals.node_down.disconnect(down)

    assert heard == [("lock-2", why)]
    assert [record.getMessage() for record in caplog.records] == [f"lock node down: lock-2 (default): {why}"]
    assert [(record.node, record.reason) for record in caplog.records] == [("lock-2", why)]
    if patient.running:
        patient.thaw()


# What the checks find


def deployed(*nodes: str, **options: Any) -> dict[str, str]:
    """Return what ``check --deploy`` reports about nodes that can never vote, and what ``check`` alone reports."""
    with override_settings(REDLOCK={"default": {"NODES": list(nodes), "OPTIONS": options}}):
        plain = checks.run_checks(tags=["redlock"], databases=[])
        messages = checks.run_checks(tags=["redlock"], include_deployment_checks=True, databases=[])
    assert "redlock.W104" not in [message.id for message in plain]
    found = [message for message in messages if message.id == "redlock.W104"]
    assert all("redlock_doctor" in message.hint for message in found)
    return {message.msg.split("the node '")[1].split("'")[0]: message.msg.partition("vote: ")[2] for message in found}


def name(url: str) -> str:
    return url.rpartition("@")[2].removeprefix("redis://").removesuffix("/0")


@pytest.mark.parametrize("why", ["is a replica", "WRONGPASS", "NOAUTH"])
def test_check_finds_a_node_that_can_never_vote(nodes: Servers, patient: Server, why: str):
    """A node may answer and still not vote until the server or the settings are changed; the check reports it."""
    url = harmed(patient, why)

    assert deployed(*nodes.urls[:2], url) == {name(url): f"{why}."}


def test_check_finds_one_that_may_evict_and_one_that_is_listed_twice(nodes: Servers, patient: Server):
    """The check also finds faults that only INFO shows."""
    with patient.client() as client, FaultProxy(nodes.urls[0]) as twice:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        found = deployed(*nodes.urls[:2], twice.url, patient.url)
        allowed = deployed(*nodes.urls[1:3], patient.url, allow_evicting=[name(patient.url)])

    assert found[name(patient.url)].startswith("may evict keys")
    assert any("is the same server as" in why for why in found.values())
    assert allowed == {}


def test_check_is_silent_about_nodes_that_do_not_answer_or_that_are_only_new(nodes: Servers, patient: Server):
    """Checks may run in another network; a server that has just started will vote."""
    patient.kill()

    assert deployed(*nodes.urls[:2], patient.url, node_timeout=1.0) == {}
    assert deployed(*nodes.urls[:3], restart_guard=True) == {}
