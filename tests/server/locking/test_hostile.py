"""A node that is hostile costs an attempt its node timeout, a little memory, and nothing that the others hold."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from io import StringIO
from itertools import product
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from django_redlock import LockManager, LockTakenError, QuorumUnavailableError, lock, locks
from django_redlock.models import key_of
from django_redlock.testing import Servers
from tests import consensus
from tests.held import DETAIL, LIST, LIVE, NODES, client_of
from tests.hostile import FORMS, STAGES, Hostile, hostile
from tests.managers import Flavour, patient_manager, real_manager

KINDS = [kind for kind in FORMS if consensus.PRESENT or kind not in ("etcd", "zookeeper")]
NODE_TIMEOUT = 0.25  # seconds
PROCESSOR = 2 * NODE_TIMEOUT  # seconds of processor time: a node timeout of reading, and whatever else runs meanwhile
MEMORY = 16 * 1024  # kB
PATIENT = 30.0  # seconds that nothing takes, however busy the machine is


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[..., Hostile]]:
    """Start a hostile server of each kind at its first use."""
    with ExitStack() as stack:
        yield cache(lambda *about: stack.enter_context(hostile(*about)))


@pytest.fixture
def node(request: pytest.FixtureRequest, started: Callable[..., Hostile]) -> Hostile:
    """A hostile server of each kind."""
    kind = request.param
    honest = request.getfixturevalue("nodes")[4] if kind in ("redis", "rediss") else request.getfixturevalue(kind)
    certificates = request.getfixturevalue("certificates").folder if kind == "rediss" else None
    one = started(kind, honest.url, certificates)
    one.attack("", "")
    patient_manager([one.url]).lock("free", wait=0).acquire().release()  # it is honest until it attacks
    return one


def memory(field: str) -> int:
    """Return a figure of this process's memory in kB: ``VmRSS`` at present, ``VmHWM`` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def memory_so_far() -> int:
    """Return the memory of this process in kB, and have the most be counted from now on."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


async def cost(request: Awaitable[None]) -> str:
    """Make a request; return what it cost if that was too much, of memory also in the background, for a while."""
    before, processor, began = memory_so_far(), time.process_time(), time.monotonic()
    await request
    processor, seconds = time.process_time() - processor, time.monotonic() - began
    await asyncio.sleep(0.1)
    more = memory("VmHWM") - before
    if processor < PROCESSOR and more < MEMORY and seconds < PATIENT:
        return ""
    return f"{processor:.3f} s of processor time, {seconds:.2f} s, {more} kB"


async def ask(flavour: Flavour, manager: LockManager, stage: str) -> None:
    """Make a request of a kind with ``wait=0``, or one that waits for a notification."""
    with suppress(LockTakenError, QuorumUnavailableError):
        if stage == "survey":
            manager.survey(count=100)
        elif stage == "subscription":
            await flavour.acquire(manager.lock("held", wait=NODE_TIMEOUT))
        else:
            await flavour.release(await flavour.acquire(manager.lock("free", wait=0)))


# Python's ssl leaves a socket to the garbage collector if the server resets it just before the handshake.
resets_connections = pytest.mark.filterwarnings("ignore:unclosed <ssl:ResourceWarning")


@pytest.mark.parametrize(("node", "form"), [(kind, form) for kind in KINDS for form in FORMS[kind]], indirect=["node"])
@resets_connections
async def test_hostile_node_costs_little(nodes: Servers, node: Hostile, flavour: Flavour, form: str):
    """Whatever a node answers to any kind of request, an attempt ends in time, and memory stays."""
    await ask(flavour, real_manager(nodes.urls[:1], node_timeout=NODE_TIMEOUT), "script")  # a first lock costs more
    holder = real_manager([node.honest], ttl=60.0)  # the attacks take only time that is measured
    lease = await flavour.acquire(holder.lock("held"))
    costs = {}
    try:
        for stage in STAGES if form != "handshake" else ["script"]:
            node.attack(stage, form)
            manager = real_manager([node.url], node_timeout=NODE_TIMEOUT)
            costs[stage] = await cost(ask(flavour, manager, stage))
            await flavour.close(manager)
            manager.close()
        extended = await flavour.extend(lease)
    finally:
        released = await flavour.release(lease)

    assert {stage: said for stage, said in costs.items() if said} == {}
    assert (extended, released) == (True, "released")


@pytest.mark.parametrize("node", KINDS, indirect=True)
@resets_connections
async def test_lock_held_on_a_node_that_turns_hostile_is_kept(nodes: Servers, node: Hostile, flavour: Flavour):
    """Two honest nodes extend and release it, whatever the third one answers on old connections and on new ones."""
    manager = patient_manager([*nodes.urls[:2], node.url], max_extensions=100)
    lease = await flavour.acquire(manager.lock("held", renew=False))
    kept = {}
    try:
        for form, stage in product(FORMS[node.kind], ("script", "greeting", "auth")):
            node.attack(stage, form)
            began = time.monotonic()
            kept[stage, form] = await flavour.extend(lease) and time.monotonic() - began < PATIENT
    finally:
        released = await flavour.release(lease)
        manager.close()  # or it would try to redeliver the release while the node ends

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
@pytest.mark.parametrize("node", [kind for kind in KINDS if kind != "rediss"], indirect=True)
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
