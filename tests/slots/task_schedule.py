"""One schedule of Django's tasks: callers, transactions, workers and reapers over a key or two."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

from django.db import transaction

from django_redlock.core.names import secret_of
from django_redlock.exceptions import RedlockError
from django_redlock.singleton.options import SingletonOptions
from django_redlock.singleton.slot import CLAIM
from django_redlock.tasks.reaper import REPEATS
from tests.machine.runner import Outcome
from tests.machine.world import Dead

from .celery_parts import Answer
from .schedule import OUTAGES, Profile, ends_of_workers, outcome
from .task_parts import FAILED, RUNNING, Body, Row, in_production, make, moment, queue, reap, recorder, work
from .world import Machine, World

LEASE = 6.0
LONGEST = 1_000.0  # seconds of virtual time; less than a slot of a waiting row lasts
RETURN = 5.0  # seconds within which nodes come back
DEATHS = ("before the row", "after the row", "before the commit", "after the commit")


class RolledBack(Exception):
    """A transaction is to be rolled back."""


@dataclass(frozen=True, slots=True)
class TaskProfile(Profile):
    """What may happen in a schedule of Django's tasks."""

    keys: int = 1
    transactions: float = 0.4  # how often a caller opens one
    rolled_back: float = 0.4  # how often that is rolled back
    at_once: bool = False
    tells: bool = True

    def drawn(self, seed: int) -> "TaskProfile":
        """Return the profile with the values that a seed draws."""
        chance = Random(seed)
        return replace(self, **{name: chance.choice(values) for name, values in self.draws.items()}, draws={})


@dataclass(slots=True)
class TaskHistory:
    """What happened in a schedule."""

    profile: TaskProfile
    world: World
    answers: list[Answer] = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)
    objections: list[str] = field(default_factory=list)


def run(profile: TaskProfile, seed: int, traced: bool) -> Outcome:
    """Run one schedule; returns what the oracles object to."""
    profile = profile.drawn(seed)
    options = profile.options
    world = World(seed, profile, node_timeout=profile.node_timeout, traced=traced)
    drawn = {each: getattr(profile, each) for each in DRAWS if each != "options"}
    world.note(f"{options.scope}, {options.on_duplicate}, hold_for={options.hold_for}, {drawn}")
    history = TaskHistory(profile, world)
    queue.begin(world, at_once=profile.at_once, tells=profile.tells)
    recorder.profile, recorder.task, recorder.steps = profile, make(options), itertools.count()
    recorder.bodies, recorder.objections, recorder.secrets, recorder.rows = history.bodies, history.objections, {}, {}
    with world.running(), in_production(world):
        play(history, recorder.task)
    return outcome(history, seed, history.objections)


def play(history: TaskHistory, task: Any) -> None:
    profile, world = history.profile, history.world
    over: list[bool] = []
    workers: list[Machine] = []

    def employ() -> Machine:
        about = {"profile": profile, "over": over, "employ": employ, "reorder": profile.reorder}
        workers.append(world.add(f"worker {len(workers)}", partial(work, **about)))
        return workers[-1]

    for _ in range(profile.workers):
        employ()
    if profile.tells:  # the only backend whose rows can be put back can tell
        world.add("reaper", partial(reap, over=over))
    callers = [
        world.add(f"caller {number}", partial(call_often, history=history, task=task))
        for number in range(profile.callers)
    ]
    for caller in world.random.sample(callers, profile.dying):
        queue.dying[caller.name] = world.random.choice(DEATHS)
    queue.refuses = {caller.name for caller in world.random.sample(callers, profile.broken)}
    quiet: list[float] = []
    if profile.outage:
        world.add("weather", partial(OUTAGES[profile.outage], profile=profile, quiet=quiet))
    trouble = world.add("trouble", partial(make_trouble, history=history, workers=workers, employ=employ))
    world.run(world.now + profile.longest, lambda: all(one.over for one in (*callers, trouble)))
    quiet.append(world.now)
    world.run(world.now + profile.longest, lambda: all(is_settled(history, row) for row in queue.visible()))
    history.objections.extend(
        f"{row.id} never ends: {row.status}" for row in queue.visible() if not is_settled(history, row)
    )
    over.append(True)
    world.run(world.now + 120.0, lambda: all(machine.over for machine in world.machines))
    world.run(world.now + CLAIM + 2 * RETURN)


def is_settled(history: TaskHistory, row: Row) -> bool:
    """Return whether nothing more happens to a row."""
    dead = row.status == RUNNING and row.worker_ids[-1] in row.died
    unreaped = history.profile.options.scope == "until_executing" or not history.profile.tells
    return row.is_over or (dead and unreaped)


# Callers


def call_often(machine: Machine, history: TaskHistory, task: Any) -> None:
    """Do what a caller does."""
    profile, world = history.profile, machine.world
    for number in range(profile.calls):
        world.sleep(world.random.uniform(0.0, 2 * profile.spread / profile.calls))
        call = partial(make_call, history, task, machine)
        if world.random.random() < profile.transactions:
            call_in_transaction(history, machine, call, number)
        else:
            call(number)


def call_in_transaction(history: TaskHistory, machine: Machine, call: Callable[..., Answer], number: int) -> None:
    """Make some calls in one transaction, and commit it or not."""
    chance, made = machine.world.random, []

    def pause() -> None:
        long = chance.uniform(CLAIM - 2.0, CLAIM + 4.0)
        machine.world.sleep(chance.choice([0.0, 0.0, chance.uniform(0.0, 2.0), long]))

    key = chance.randrange(history.profile.keys)
    with suppress(RolledBack), transaction.atomic():
        if chance.random() < 0.4:
            with suppress(RolledBack), transaction.atomic():
                made.append(call(f"{number}s", key))
                if chance.random() < 0.7:
                    raise RolledBack
            pause()
        for again in range(chance.choice([1, 1, 2])):
            made.append(call(f"{number}t{again}", key))
            pause()
        if chance.random() < history.profile.rolled_back:
            raise RolledBack
    for answer in made:
        if answer.accepted and not answer.error and queue.rows[answer.id].gone:
            ends_soon(history, answer)


def make_call(history: TaskHistory, task: Any, machine: Machine, number: Any, key: int | None = None) -> Answer:
    """Make one call; returns its answer."""
    world, profile = machine.world, history.profile
    key = world.random.randrange(profile.keys) if key is None else key
    answer = Answer(machine.name, f"{machine.name[-1]}.{number}", next(recorder.steps), 0, world.now)
    history.answers.append(answer)
    countdown = world.random.choice(profile.countdowns)
    after = moment(world) + timedelta(seconds=countdown) if countdown else None
    recorder.secrets.pop(machine.name, None)
    world.note(f"calls {key} with {answer.value}")
    try:
        result = task.using(run_after=after).enqueue(key, answer.value)
    except (OSError, RedlockError) as error:
        answer.error = type(error).__name__
        answer.holder_id = getattr(error, "holder_id", None)
        answer.accepted, answer.duplicate = False, answer.error == "DuplicateTask"
    except Dead:
        answer.error, answer.accepted = "Dead", False
        answer.extra["secret"] = recorder.secrets.get(machine.name, "")
        mine = [row for row in queue.rows.values() if row.args_kwargs["args"][1] == answer.value]
        if not mine or mine[0].owner:  # whose transaction ends now
            ends_soon(history, answer)
        raise
    else:
        answer.id, answer.accepted, answer.duplicate = result.id, result.accepted, result.duplicate
        answer.reason, answer.holder_id = result.reason, result.holder_id
    answer.extra["secret"] = recorder.secrets.get(machine.name, "")
    answer.end = next(recorder.steps)
    world.note(f"gets {answer.error or answer.id} accepted={answer.accepted} holder={answer.holder_id}")
    if answer.duplicate and not queue.knows(answer.holder_id):
        history.objections.append(f"{answer.caller} is told of {answer.holder_id}, which is no row")
    return answer


def ends_soon(history: TaskHistory, answer: Answer) -> None:
    """Object if the claim of a call that stored no row is still there when it should have lapsed."""
    world, secret = history.world, answer.extra["secret"]
    margin = 4 * max(history.profile.ways) + history.profile.node_timeout
    margin += RETURN if history.profile.outage else 0.5

    def look() -> None:
        stores = [node.store for node in world.nodes]
        values = [store.records.holder(slug, store.now()) for store in stores for slug in list(store.records.holders)]
        if secret and sum(secret_of(value) == secret for value in values if value) > 1:
            history.objections.append(f"the slot of {answer.caller}'s call with {answer.value} stays without a row")

    world.at(world.now + CLAIM + margin, look)


# Faults


def make_trouble(machine: Machine, history: TaskHistory, workers: list[Machine], employ: Callable[[], Machine]) -> None:
    """Kill and stop workers, as the profile says."""
    world, troubles = machine.world, ends_of_workers(history.profile, machine.world, workers, employ)
    for trouble in world.random.sample(troubles, len(troubles)):
        world.sleep(world.random.uniform(0.0, 2 * history.profile.spread))
        trouble()


# The conditions that hold after a schedule


def rows_run(history: TaskHistory) -> list[str]:
    """Every stored row runs to its end, unless it was stopped, or its workers died until the reaper failed it."""
    found = []
    for row in queue.visible():
        ended = [body for body in history.bodies if body.id == row.id and body.end is not None]
        if not row.is_over or ended or row.error == "SystemExit":
            continue
        if row.status == FAILED and row.error == "WorkerDied" and len(row.died) > REPEATS:
            continue
        found.append(f"{row.id} ended without a run: {row.status} {row.error}, {len(row.died)} workers died")
    return found


def rows_run_once(history: TaskHistory) -> list[str]:
    """No row is taken by workers, or runs, more often than its workers died."""
    found = []
    for row in queue.visible():
        bodies = [body for body in history.bodies if body.id == row.id]
        if len(bodies) > 1 + len(row.died):
            found.append(f"{row.id} ran {len(bodies)} times, and {len(row.died)} workers died")
        if len(row.worker_ids) > 1 + len(row.died):
            found.append(f"{row.id} was taken by {row.worker_ids}, and {row.died} died")
    return found


def rolled_back_rows_do_not_run(history: TaskHistory) -> list[str]:
    """A row that was rolled back does not run; this is about the simulation itself."""
    return [f"{body.id} ran, though it was rolled back" for body in history.bodies if queue.rows[body.id].gone]


def duplicates_are_covered(history: TaskHistory) -> list[str]:
    """The row of which a duplicate was told ends after the call; if it only waits, it begins after the call."""
    found, options = [], history.profile.options
    # The release has its way to each node, and the worker may lose a turn before it sends it to one.
    unheard = 3 * max(history.profile.ways) + (options.lease + RETURN if history.profile.outage else 0.0)
    for answer in history.answers:
        row = queue.rows.get(answer.holder_id or "") if answer.duplicate else None
        if row is None or row.gone or not row.is_over or row.error in ("WorkerDied", "SystemExit"):
            continue
        bodies = [body for body in history.bodies if body.id == row.id]
        held = max((body.start + options.hold_for for body in bodies), default=0.0)
        ended = max((body.end for body in bodies if body.end is not None), default=0.0)
        if max(ended, held) + unheard < answer.began:
            found.append(f"{answer.caller}'s call with {answer.value} is a duplicate of {row.id}, which had ended")
    return found


ORACLES: tuple[Callable[[Any], list[str]], ...] = (
    rows_run,
    rows_run_once,
    rolled_back_rows_do_not_run,
    duplicates_are_covered,
)
KEY = ("key",)
SCOPES: tuple[Mapping[str, Any], ...] = (
    *(
        {"scope": scope, "on_duplicate": how}
        for scope in ("until_executed", "until_and_while_executing")
        for how in ("join", "skip", "raise")
    ),
    {"scope": "while_executing"},
    {"scope": "while_executing", "hold_for": 1.5},
    {"scope": "until_executed", "hold_for": 1.5},
    {"scope": "until_executing"},
)
DRAWS: Mapping[str, Sequence[Any]] = {
    "options": tuple(SingletonOptions(key=KEY, lease=LEASE, **scope) for scope in SCOPES),
    "workers": (1, 1, 2, 3),
    "keys": (1, 2, 2),
    "callers": (3, 5, 6),
    "transactions": (0.3, 0.8),
    "length": (0.3, 2.0, 8.0, 8.0),
    "ways": ((0.0,), (0.0, 0.001, 0.02), (0.0, 0.01, 0.1)),
    "outage": ("", "", "", "one", "another", "flapping", "quorum"),
    "kills": (0, 0, 1, 3),
    "stops": (0, 0, 0, 1),
    "dying": (0, 1, 2),
    "broken": (0, 0, 1),
    "at_once": (False, False, True),
    "tells": (True, True, True, False),
    "countdowns": ((0.0,), (0.0, 0.0, 3.0)),
}
PROFILE = TaskProfile(
    "django tasks",
    DRAWS["options"][0],
    ORACLES,
    calls=4,
    spread=8.0,
    reorder=0.5,
    fail=0.1,
    longest=LONGEST,
    draws=DRAWS,
    played=run,
)
