"""One schedule: callers and workers over one key, and what the oracles say of it."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from celery import states

from django_redlock.celery import SingletonOptions
from django_redlock.core.protocol import PERMITS
from django_redlock.exceptions import RedlockError
from django_redlock.singleton.driver import Nodes, free
from django_redlock.singleton.questions import Look
from tests.machine.network import Hazards
from tests.machine.runner import Outcome

from . import oracles
from .celery_parts import Answer, Broker, RecordingTask, Revoked, make, results, work
from .world import Away, Machine, World

NEXT = "next:task:slots.{}:key=7"  # the record of the pending call
LONGEST = 20_000.0  # seconds of virtual time
AFTER = 30.0  # seconds for which nodes come and go after the last call

Outage = Literal["", "one", "another", "flapping", "quorum"]
"""
Which lock nodes are away, apart from ``downs``: none; one from some moment on; one, and then another instead of it; one
at a time, again and again; or, now and then for a moment, two or all.
"""


@dataclass(frozen=True, slots=True)
class Profile(Hazards):
    """What may happen in a schedule."""

    name: str
    options: SingletonOptions
    oracles: tuple[Callable[["History"], list[str]], ...]
    callers: int = 3
    calls: int = 3
    countdowns: tuple[float, ...] = (0.0,)
    expires: tuple[float | None, ...] = (None,)
    workers: int = 2
    idle: bool = False
    spread: float = 2.0
    length: float = 1.0
    lengths: tuple[float, float] = (0.2, 2.0)  # the shortest and the longest run, as a part of *length*
    late: bool = False
    reorder: float = 0.3
    fail: float = 0.0
    kills: int = 0
    redeliver: float = 0.0
    purge: bool = False
    broken: int = 0
    downs: int = 0
    owned: int = 0
    freed: int = 0
    revoked: int = 0
    newcomers: bool = False
    longest: float = LONGEST
    same: float = 0.2
    held: bool = False
    outage: Outage = ""
    node_timeout: float = 0.25
    dying: int = 0
    backend: Literal["", "away", "slow", "full"] = ""
    prefetched: float = 0.0
    unseen: tuple[float, ...] = (0.0,)
    recycled: float = 0.0
    cut_short: float = 0.0
    stops: int = 0
    ignored: bool = False
    draws: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    played: Callable[[Any, int, bool], Outcome] | None = None  # what runs its schedules, if not :func:`run`

    def drawn(self, seed: int) -> "Profile":
        """Return the profile with the values that a seed draws."""
        chosen = {}
        for name, values in self.draws.items():
            seed, number = divmod(seed, len(values))
            chosen[name] = values[number]
        return replace(self, **chosen, draws={})


@dataclass(slots=True)
class History:
    """What happened in a schedule."""

    profile: Profile
    world: World
    broker: Broker
    answers: list[Answer] = field(default_factory=list)
    runs: list[Any] = field(default_factory=list)
    revoked: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)

    def state(self, task_id: str) -> str:
        return results.state(task_id)


def run(profile: Profile, seed: int, traced: bool = False) -> Outcome:
    """Run one schedule; returns what the oracles object to."""
    if profile.played:
        return profile.played(profile, seed, traced)
    profile = profile.drawn(seed)
    options = profile.options
    world = World(seed, profile, node_timeout=profile.node_timeout, traced=traced)
    world.note(f"{options.scope}, {options.on_duplicate}, acks_late={profile.late}")
    broker = Broker(world, reorder=profile.reorder)
    history = History(profile, world, broker)
    results.begin(world)
    task = make(profile.name, options, acks_late=profile.late, ignore_result=profile.ignored)
    here = RecordingTask.recorder
    here.world, here.broker, here.runs = world, broker, history.runs
    here.length, here.lengths, here.fail, here.steps = profile.length, profile.lengths, profile.fail, itertools.count()
    with world.running(), Revoked(world).known() as revoked:
        play(history, task, revoked)
    return outcome(history, seed)


def outcome(history: Any, seed: int, objections: Sequence[str] = ()) -> Outcome:
    """Ask the oracles about a schedule that has ended, to which there may be objections already."""
    profile = history.profile
    found = [(oracle.__name__, each) for oracle in profile.oracles for each in oracle(history)]
    found[:0] = [("schedule", each) for each in objections]
    return Outcome("tests.slots", profile, seed, found, history.world.trace or [])


def play(history: History, task: Any, revoked: Revoked) -> None:
    profile, world, broker = history.profile, history.world, history.broker
    over: list[bool] = []
    workers: list[Machine] = []

    def employ() -> Machine:
        about = {"task": task, "broker": broker, "profile": profile, "over": over, "employ": employ}
        workers.append(world.add(f"worker {len(workers)}", partial(work, **about)))
        return workers[-1]

    for _ in range(0 if profile.idle else profile.workers):
        employ()
    if profile.held:
        first = world.add("first", partial(call_often, history=history, task=task, calls=1))
        world.run(world.now + profile.longest, lambda: first.over and bool(history.runs))
    callers = [
        world.add(f"caller {number}", partial(call_often, history=history, task=task, calls=profile.calls))
        for number in range(profile.callers)
    ]
    quiet: list[float] = []  # when the last call was made
    if profile.outage:
        world.add("weather", partial(OUTAGES[profile.outage], profile=profile, quiet=quiet))
    if profile.backend:
        world.add("backend", partial(trouble_backend, profile=profile, quiet=quiet))
    about = {"history": history, "workers": workers, "employ": employ, "revoked": revoked}
    trouble = world.add("trouble", partial(make_trouble, **about))
    world.run(world.now + profile.longest, lambda: all(caller.over for caller in callers))
    for _ in range(profile.workers if profile.idle else 0):
        employ()
    world.run(world.now + profile.longest, lambda: trouble.over)
    broker.busy = False
    quiet.append(world.now)
    world.run(world.now + profile.longest, lambda: not broker.queue and not broker.unacked)
    over.append(True)
    world.run(world.now + 3600.0, lambda: all(machine.over for machine in world.machines))
    world.run(world.now + 2.0)
    history.left = held_names(world)


def call_often(machine: Machine, history: History, task: Any, calls: int) -> None:
    """Do what a caller does."""
    profile, world = history.profile, machine.world
    for number in range(calls):
        if profile.spread and (number or calls > 1):
            world.sleep(world.random.uniform(0.0, profile.spread / profile.calls))
        same = world.random.random() < profile.same
        value = "same" if same else f"{machine.name[-1]}{number}"
        options: dict[str, Any] = {"countdown": world.random.choice(profile.countdowns)}
        expires = world.random.choice(profile.expires) if any(profile.expires) else None
        if expires:
            options["expires"] = expires
        if number < profile.owned:
            options["task_id"] = f"own-{machine.name[-1]}{number}"
        history.answers.append(make_call(history, task, machine, value, options))


def make_call(history: History, task: Any, machine: Machine, value: str, options: dict[str, Any]) -> Answer:
    """Make one call; returns its answer."""
    here = RecordingTask.recorder
    world, before = machine.world, machine_sent(history, machine)
    answer = Answer(machine.name, value, next(here.steps), 0, world.now, extra=options)
    world.note(f"calls with {value} {options}")
    try:
        result = task.apply_async((7, value), **options)
    except (OSError, RedlockError) as error:
        answer.error = type(error).__name__
        answer.holder_id = getattr(error, "holder_id", None)
    else:
        answer.id, answer.accepted, answer.duplicate = result.id, result.accepted, result.duplicate
        answer.reason, answer.holder_id = result.reason, result.holder_id
    answer.end, answer.sent = next(here.steps), machine_sent(history, machine) - before
    world.note(f"gets {answer.error or answer.id[:4]} accepted={answer.accepted} duplicate={answer.duplicate}")
    return answer


def machine_sent(history: History, machine: Machine) -> int:
    return history.broker.by_sender.get(machine.name, 0)


def make_trouble(
    machine: Machine, history: History, workers: list[Machine], employ: Callable[[], Machine], revoked: Revoked
) -> None:
    """Kill workers, redeliver and purge messages, and take lock nodes away, as the profile says."""
    profile, world, broker, chance = history.profile, machine.world, history.broker, machine.world.random
    troubles: list[Callable[[], None]] = []

    def redeliver() -> None:
        for message in list(broker.unacked):
            if chance.random() < profile.redeliver:
                broker.queue.append(message.again())

    def down() -> None:
        number = chance.randrange(3)
        world.take_away(number, "down")
        world.sleep(chance.uniform(0.1, 3.0))
        world.bring_back(number)

    def free_pending() -> None:
        (record,) = Nodes("default", profile.name).look(Look((NEXT.format(profile.name),)))
        if record.value:
            world.note("an operator frees the pending call")
            free("default", NEXT.format(profile.name), record.secret)

    def revoke() -> None:
        waiting = [answer.id for answer in history.answers if answer.id and history.state(answer.id) == states.PENDING]
        if waiting:
            victim = chance.choice(waiting)
            world.note(f"{victim[:4]} is revoked")
            history.revoked.add(victim)
            revoked.tell(workers, victim)
            results.mark_as_revoked(victim, "revoked", store_result=True)
            if profile.newcomers:
                employ()

    troubles += [revoke] * profile.revoked + ends_of_workers(profile, world, workers, employ)
    troubles += [down] * profile.downs + [free_pending] * profile.freed
    troubles += [redeliver] * (3 if profile.redeliver else 0) + [broker.purge] * profile.purge
    broker.fails = {f"caller {chance.randrange(profile.callers)}": 1 for _ in range(profile.broken)}
    broker.dying = {f"caller {chance.randrange(profile.callers)}" for _ in range(profile.dying)}
    for trouble in chance.sample(troubles, len(troubles)):
        world.sleep(chance.uniform(0.0, profile.spread))
        trouble()


def ends_of_workers(
    profile: Profile, world: World, workers: list[Machine], employ: Callable[[], Machine]
) -> list[Callable[[], None]]:
    """Return what kills and stops workers, as often as the profile says; those that have a message first."""

    def kill() -> None:
        if alive := [worker for worker in workers if not worker.over]:
            victim = world.random.choice([worker for worker in alive if worker.busy] or alive)
            world.note(f"{victim.name} is killed")
            employ()
            victim.kill()

    def stop() -> None:
        if busy := [worker for worker in workers if worker.busy and not worker.over]:
            victim = world.random.choice(busy)
            world.note(f"{victim.name} is stopped")
            victim.terminate()

    return [kill] * profile.kills + [stop] * profile.stops


# Lock nodes that are away


def one_is_away(machine: Machine, profile: Profile, quiet: list[float]) -> None:
    """Take one node away for good, at once or some time later."""
    world, chance = machine.world, machine.world.random
    world.sleep(chance.choice([0.0, chance.uniform(0.0, profile.spread)]))
    world.take_away(chance.randrange(3), chance.choice(get_args(Away)))


def another_is_away(machine: Machine, profile: Profile, quiet: list[float]) -> None:
    """Take one node away at first, and another one when that is back; so the first one has missed what ended."""
    world, chance = machine.world, machine.world.random
    first, second = chance.sample(range(3), 2)
    world.sleep(chance.choice([0.0, chance.uniform(0.0, profile.spread / 4)]))
    world.take_away(first, chance.choice(get_args(Away)))
    world.sleep(chance.uniform(0.3, 0.7) * profile.spread)
    world.bring_back(first)
    world.sleep(chance.uniform(0.0, 0.2))
    world.take_away(second, chance.choice(get_args(Away)))


def nodes_flap(machine: Machine, profile: Profile, quiet: list[float]) -> None:
    """Take one node away at a time, again and again."""
    world, chance = machine.world, machine.world.random
    while not quiet or world.now < quiet[0] + AFTER:
        number = chance.randrange(3)
        world.take_away(number, chance.choice(get_args(Away)))
        world.sleep(chance.uniform(0.1, 2.0))
        world.bring_back(number)
        world.sleep(chance.choice([0.0, chance.uniform(0.0, 1.0)]))


def quorum_is_away(machine: Machine, profile: Profile, quiet: list[float]) -> None:
    """Take two or all nodes away for a moment, now and then: between any two requests."""
    world, chance = machine.world, machine.world.random
    while not quiet or world.now < quiet[0] + AFTER:
        gone, how = chance.sample(range(3), chance.choice([2, 3])), chance.choice(get_args(Away))

        def fall(gone: list[int] = gone, how: Away = how) -> None:
            for number in gone:
                world.take_away(number, how)

        world.sleep(chance.uniform(0.0, 1.0))
        world.until_request(chance.randrange(1, 30), fall, 1.0)
        world.sleep(chance.uniform(0.1, 3.0))
        for number in gone:
            world.bring_back(number)


OUTAGES: dict[str, Callable[..., None]] = {
    "one": one_is_away,
    "another": another_is_away,
    "flapping": nodes_flap,
    "quorum": quorum_is_away,
}


def trouble_backend(machine: Machine, profile: Profile, quiet: list[float]) -> None:
    """Let the result backend fail for a while, again and again."""
    world, chance = machine.world, machine.world.random
    while not quiet or world.now < quiet[0] + AFTER:
        world.sleep(chance.uniform(0.0, 1.0))
        results.trouble = profile.backend
        world.sleep(chance.uniform(1.0, 9.0))
        results.trouble = ""


def held_names(world: World) -> set[str]:
    """Return the names that one holder has on a quorum of nodes, without the notes about what has been."""
    held: Counter[tuple[str, str]] = Counter()
    for store in (node.store for node in world.nodes):
        held.update((slug, store.records.owner(slug, store.now())) for slug in list(store.records.holders))
    # A release that a node did not get leaves a permit there. Two of these are nobody's, though both nodes say that the
    # lock has some.
    names = {
        slug.strip("{}")
        for (slug, secret), nodes in held.items()
        if nodes > 1 and secret and not secret.startswith(PERMITS)
    }
    return {name for name in names if not name.startswith(oracles.NOTES)}
