"""A node that is hostile costs an attempt its node timeout, a little memory, and nothing that the others hold."""

import asyncio
import time
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from io import StringIO
from itertools import product
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from django_redlock import LockManager, LockTakenError, QuorumUnavailableError, lock, locks
from django_redlock.models import key_of
from django_redlock.testing import Servers
from tests.held import DETAIL, LIST, LIVE, NODES, client_of
from tests.hostile import FORMS, STAGES, TLS_FORMS, Hostile, hostile
from tests.managers import Flavour, patient_manager, real_manager

NODE_TIMEOUT = 0.25  # seconds
PROCESSOR = NODE_TIMEOUT + 0.05  # seconds of processor time
MEMORY = 16 * 1024  # kB
PATIENT = 30.0  # seconds that nothing takes, however busy the machine is
KINDS = ["redis", "etcd", "zookeeper"]


@pytest.fixture
def node(request: pytest.FixtureRequest) -> Iterator[Hostile]:
    """A hostile server of each kind."""
    kind = request.param
    honest = request.getfixturevalue("nodes")[4] if kind in ("redis", "rediss") else request.getfixturevalue(kind)
    certificates = request.getfixturevalue("certificates").folder if kind == "rediss" else None
    with hostile(kind, honest.url, certificates) as one:
        patient_manager([one.url]).lock("free", wait=0).acquire().release()  # it is honest until it attacks
        yield one


def memory(field: str) -> int:
    """Return a figure of this process's memory in kB: ``VmRSS`` at present, ``VmHWM`` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


class Cost:
    """The processor time and the memory that a request takes; the memory also in the background, for a while."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the most from now on
        self._memory, self._processor, self._began = memory("VmRSS"), time.process_time(), time.monotonic()

    async def measure(self, request: Awaitable[None]) -> None:
        await request
        self.processor = time.process_time() - self._processor
        self.seconds = time.monotonic() - self._began
        await asyncio.sleep(0.1)
        self.memory = memory("VmHWM") - self._memory

    def __str__(self) -> str:
        return f"{self.processor:.3f} s of processor time, {self.seconds:.2f} s, {self.memory} kB"

    @property
    def bounded(self) -> bool:
        return self.processor < PROCESSOR and self.memory < MEMORY and self.seconds < PATIENT


async def ask(flavour: Flavour, manager: LockManager, stage: str) -> None:
    """Make a request of a kind with ``wait=0``, or one that waits for a notification."""
    with suppress(LockTakenError, QuorumUnavailableError):
        if stage == "survey":
            manager.survey(count=100)
        elif stage == "subscription":
            await flavour.acquire(manager.lock("held", wait=NODE_TIMEOUT))
        else:
            lease = await flavour.acquire(manager.lock("free", wait=0))
            await flavour.release(lease)


@pytest.mark.parametrize(("node", "form"), [*product(KINDS, FORMS), *product(["rediss"], TLS_FORMS)], indirect=["node"])
@pytest.mark.parametrize("honest", [0, 2], ids=["alone", "one of three"])
async def test_hostile_node_costs_little(nodes: Servers, node: Hostile, flavour: Flavour, honest: int, form: str):
    """
    Whatever a node answers to any kind of request, an attempt ends in time, memory stays, and held locks are kept.
    """
    urls = nodes.urls[:honest]
    warm = real_manager(nodes.urls[:1], node_timeout=NODE_TIMEOUT)
    await ask(flavour, warm, "script")
    holder = real_manager(urls or [node.honest], ttl=60.0)
    kept = await flavour.acquire(holder.lock("held"))
    costs: dict[str, Cost] = {}
    try:
        for stage in STAGES:
            node.attack(stage, form)
            manager = real_manager([*urls, node.url], node_timeout=NODE_TIMEOUT)
            costs[stage] = Cost()
            await costs[stage].measure(ask(flavour, manager, stage))
            await flavour.close(manager)
            manager.close()
        extended = kept.valid() and await flavour.extend(kept)
    finally:
        released = await flavour.release(kept)

    assert {stage: str(cost) for stage, cost in costs.items() if not cost.bounded} == {}
    assert (extended, released) == (True, "released")


@pytest.mark.parametrize("node", [*KINDS, "rediss"], indirect=True)
async def test_lock_held_on_a_node_that_turns_hostile_is_kept(nodes: Servers, node: Hostile, flavour: Flavour):
    """Two honest nodes extend and release it, whatever the third one answers on old connections and on new ones."""
    manager = patient_manager([*nodes.urls[:2], node.url], ttl=60.0, max_extensions=100)
    lease = await flavour.acquire(manager.lock("held", renew=False))
    kept = {}
    try:
        for form, stage in product(TLS_FORMS if node.kind == "rediss" else FORMS, ("script", "greeting", "auth")):
            node.attack(stage, form)
            began = time.monotonic()
            kept[stage, form] = lease.valid() and await flavour.extend(lease) and time.monotonic() - began < PATIENT
    finally:
        released = await flavour.release(lease)

    assert [attack for attack, held in kept.items() if not held] == []
    assert released == "released"


COMMANDS = [("redlock_doctor",), ("redlock_doctor", "--json"), ("redlock_list",), ("redlock_list", "--format=csv")]
COMMANDS += [("redlock_inspect", "free"), ("redlock_release", "free", "--no-input"), ("redlock_clear", "--dry-run")]
COMMANDS += [("redlock_top", "--once")]


def output_of(command: str, *arguments: str) -> str:
    """Return what a command writes on the terminal."""
    out, errors = StringIO(), StringIO()
    with suppress(SystemExit):
        try:
            call_command(command, *arguments, stdout=out, stderr=errors, no_color=True)
        except CommandError as error:
            errors.write(str(error))
    return out.getvalue() + errors.getvalue()


@pytest.mark.django_db
@pytest.mark.parametrize("node", [*KINDS, "rediss"], indirect=True)
@pytest.mark.parametrize("stage", STAGES)
def test_no_control_character_of_a_node_reaches_a_person(node: Hostile, stage: str, caplog: pytest.LogCaptureFixture):
    """Whatever text a node puts into its replies, logs, errors, commands and pages show it escaped, and cut short."""
    node.attack(stage, "control")
    options = {"restart_guard": False, "node_timeout": NODE_TIMEOUT, "ttl": 10.0}
    viewer = client_of("view_heldlock", "release_heldlock")
    with override_settings(REDLOCK={"default": {"NODES": [node.url], "KEY_PREFIX": "t", "OPTIONS": options}}):
        error = ""
        try:
            lock("free", wait=0).acquire().release()
        except (LockTakenError, QuorumUnavailableError) as raised:
            error = str(raised)
        said = {"error": error}
        said |= {" ".join(command): output_of(*command) for command in COMMANDS}
        said |= {page: viewer.get(page).content.decode() for page in (LIST, NODES, LIVE)}
        said["lock"] = viewer.get(DETAIL, {"key": key_of("default", "", "{free}")}).content.decode()
        locks.reset()
    said["log"] = caplog.text

    assert {what: text for what, text in said.items() if any(map(loud, text))} == {}
    assert {what: len(text) for what, text in said.items() if len(text) > 100_000} == {}


def loud(letter: str) -> bool:
    """Return whether a letter could move a cursor."""
    return not letter.isprintable() and letter != "\n"
