"""One schedule: nodes, clients that increment counters under a lock, and the hazards meanwhile."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django_redlock.core.acquisition import Acquisition
from django_redlock.core.admission import INFINITY, OLD
from django_redlock.core.protocol import EndReason
from django_redlock.core.round import Round
from django_redlock.core.rules import Rules, Wanted, majority
from django_redlock.engine.lease import Lease
from django_redlock.engine.manager import Acquirer, LockManager
from django_redlock.engine.watchdog import unreleased
from django_redlock.exceptions import RedlockError
from tests.machine.network import Faults, Node
from tests.machine.process import Process
from tests.machine.runner import Outcome
from tests.machine.world import EPOCH, Cancelled, Clock, World

from .database import GUARDS, Database, increment
from .oracles import Oracles
from .profiles import TTL, Profile

BUSY = (0.5, 1.0, 1.0, 4.0)  # seconds of hazards
STEP = 0.3  # the least seconds by which a clock steps
QUIET = 20.0  # seconds without hazards, in which every client must get the lock once more
NODE_SKEW = 0.2  # maximum error of node clocks in seconds: beyond a second the nodes would not vote


@dataclass(frozen=True, slots=True)
class Wish:
    """A lock that a client may want."""

    names: tuple[str, ...]
    limit: int = 1
    shared: bool = False
    hold_for: float = 0.0


A = Wish(("a",))
# The locks of one schedule.
THEMES = (
    (A, A, A, Wish(("b",)), Wish(("a", "b"))),
    (A, Wish(("two",), limit=2)),
    (A, Wish(("pages",)), Wish(("pages",), shared=True), Wish(("pages",), shared=True)),
    # Callers that disagree.
    (
        *(A, Wish(("mixed",)), Wish(("mixed",), shared=True)),
        *(Wish(("mixed",), limit=2), Wish(("mixed",), limit=2), Wish(("mixed",), limit=3)),
    ),
)

# With minimum holds that are shorter and longer than the lease.
HOLDS = (
    *(A, Wish(("short",), hold_for=0.6 * TTL), Wish(("two",), limit=2, hold_for=3 * TTL)),
    *(Wish(("long",), hold_for=3 * TTL), Wish(("long", "short"), hold_for=2 * TTL)),
    *(Wish(("pages",), hold_for=2 * TTL), Wish(("pages",), shared=True, hold_for=2 * TTL)),
)


class WatchedManager(LockManager):
    """Tells the oracles of the extensions of its leases."""

    client: "Client"

    def _renewals(self, leases: Sequence[Lease], ttl: float | None = None) -> Iterator[tuple[Round, list[Lease]]]:
        for round, chosen in super()._renewals(leases, ttl):
            before = [(lease, lease.extensions, lease.hold.deadline) for lease in chosen]
            yield round, chosen
            now = self.client.clock()
            for lease, extensions, deadline in before:
                if lease.extensions > extensions:
                    self.client.oracles.extended(lease, round, late=now >= deadline)


class WatchedAcquirer(Acquirer):
    """Tells the oracles of the locks that it takes, with secrets that a seed draws."""

    _manager: WatchedManager

    def acquisition(self, wanted: Wanted, waiter: str = "") -> Acquisition:
        client = self._manager.client
        return Acquisition(wanted, self._rules, self._highest, client.fresh_secret, client.random, waiter)

    def held(self, wanted: Wanted, outcome: Any, *about: Any, **more: Any) -> Lease:
        lease = super().held(wanted, outcome, *about, **more)
        unreleased.pop(lease.hold, None)  # a schedule may forget it
        client = self._manager.client
        client.world.log(client.name, "GRANTED", *wanted.names, lease.secret[:4], f"#{lease.fencing_token % 10**9}")
        client.oracles.granted(lease, outcome)
        return lease


class Client(Process):
    """A working process: takes locks, increments under them, and dies from time to time."""

    manager_class = WatchedManager
    manager: WatchedManager

    def __init__(self, schedule: "Schedule", name: str) -> None:
        world, looping = schedule.world, schedule.world.random.random() < 0.5
        super().__init__(world, name, schedule.machines, schedule.rules, schedule.faults, looping=looping)
        self.manager.client = self
        self.manager.acquirer = WatchedAcquirer(self.manager)
        self.profile = schedule.profile
        self.oracles = schedule.oracles
        self.sessions: list[tuple[object, str]] = []
        self.wishes = schedule.wishes
        self.quiet = False
        self.satisfied = False

    def fresh_secret(self) -> str:
        return f"{self.world.random.getrandbits(128):032x}"

    def begins(self, round: Round) -> None:
        self.oracles.first_byte(round, self.clock())

    def acquire(
        self,
        names: tuple[str, ...],
        wait: float | None,
        limit: int = 1,
        shared: bool = False,
        renew: bool = False,
        hold_for: float = 0.0,
    ) -> Lease | RedlockError:
        """Try to take a lock; return the lease or the error."""
        lock = self.manager.lock(names, ttl=TTL, wait=wait, limit=limit, shared=shared, renew=renew, hold_for=hold_for)
        wanted, acquirer = lock.description().wanted, self.manager.acquirer
        try:
            if self.loop:
                return self.run(acquirer.atake(wanted, renew, object()))  # type: ignore[no-any-return]
            return acquirer.take(wanted, renew, object())
        except RedlockError as error:
            self.world.log(self.name, "gives up", *names)
            return error
        except Cancelled:
            self.world.log(self.name, "is cancelled", *names)
            raise

    def release(self, lease: Lease, sends: bool | None = None) -> str:
        """
        Release a lock; return what the nodes report about it.

        If it *sends* the release, it does not wait for the replies, unless the lease is near its end. None leaves that
        to chance.
        """
        chosen = self.random() < 0.5 if sends is None else sends
        wait = not (chosen and lease.hold.remaining(self.clock()) > lease.hold.timeout)
        self.world.log(self.name, "releases" if wait else "sends", lease.secret[:4], lease.hold.ended)
        return self.run(lease.arelease(wait)) if self.loop else lease.release(wait)

    def work(self, database: Database) -> None:
        """Take locks and increment counters until the hazards end; then once more."""
        random = self.world.random
        while not self.quiet:
            self.thread.sleep(random.expovariate(10))
            lease = self.try_to_get(random.choice(self.wishes), random.choice((0.0, 0.3, 2.0, None)))
            if isinstance(lease, Lease):
                self.section(database, lease)
        for wish in (A, self.wishes[-1]):
            lease = self.acquire(wish.names, None, wish.limit, wish.shared, hold_for=wish.hold_for)
            assert isinstance(lease, Lease)
            self.release(lease)
        self.satisfied = True

    def try_to_get(self, wish: Wish, wait: float | None) -> Lease | RedlockError | None:
        """Acquire a lock, unless that is cancelled at some moment."""
        random, trying = self.world.random, [self.thread]
        if random.random() < self.profile.cancel:
            moment = random.choice((0.0002, 0.001, 0.02, 0.5)) * random.random()
            self.after(moment, lambda: trying and trying[0].cancel())
        try:
            return self.acquire(wish.names, wait, wish.limit, wish.shared, random.random() < 0.6, wish.hold_for)
        except Cancelled:
            return None
        finally:
            trying.clear()

    def offset(self, machine: Node) -> float | None:
        """Return by how much it considers a node's clock ahead of its own steady one, None if it knows nothing."""
        offset = self.manager.driver.admission._most[machine.number]
        return None if offset == INFINITY else offset

    def sees_step(self, machine: Node, before: float) -> bool:
        """Return whether a node's clock is far from where it was *before*, as far as the client knows."""
        return abs((self.offset(machine) or before) - before) > STEP / 2

    def section(self, database: Database, lease: Lease) -> None:
        """Increment under a lock, and release it unless it is left to expire."""
        random, hold = self.world.random, lease.hold
        for guard in random.sample(GUARDS, 0 if hold.shared else 2):  # a shared holder does not write
            if not lease.valid():
                break
            self.breathe()
            increment(database, self, random.choice(hold._slugs), lease.fencing_token, lease.secret, guard)
        if random.random() < 0.2:
            self.thread.sleep(random.uniform(0, 1.5 * TTL))
        if hold.keeps and random.random() < 0.1:  # the work failed, and hold_on_error is off
            hold.keeps = False
            self.oracles.freed(lease)
        if self.quiet or random.random() < 0.9:
            self.release(lease)
        else:
            hold.end(EndReason.EXPIRED, self.clock())  # dropped: neither renewed nor released


class Schedule:
    def __init__(self, profile: Profile, seed: int, traced: bool = False, **options: object) -> None:
        self.profile = profile
        self.seed = seed
        self.world = world = World(seed, traced)
        self.busy = world.random.choice(BUSY) * profile.busy
        self.wishes = HOLDS if profile.holds else world.random.choice(THEMES)
        nodes, quorum = world.random.choice(profile.sizes)
        quorum = quorum or majority(nodes)
        self.rules = Rules(nodes, quorum, ttl=TTL, max_ttl=TTL, **options)  # type: ignore[arg-type]
        self.oracles = Oracles(world, quorum, nodes > 2)
        self.oracles.holds = {wish.names: wish.hold_for for wish in self.wishes}
        self.faults = Faults(world, profile)
        stores = min(world.random.choice(profile.stores), nodes)
        self.stores: list[Any] = []
        if stores:
            from .consensus.records import Store  # only here: the checkout may lack it

            self.stores = [Store(world, number, self.oracles, profile) for number in range(stores)]
        self.servers = [Node(world, number, self.oracles) for number in range(stores, nodes)]
        self.machines: list[Any] = [*self.stores, *self.servers]
        self.database = Database(world, profile, self.faults)
        self.crashing = self.servers
        self.clients: list[Client] = []
        world.log("world", f"{nodes} nodes, quorum {self.rules.needed}")

    def run(self) -> Outcome:
        """Run the schedule and check it."""
        world, random = self.world, self.world.random
        for machine in self.servers:
            self._set(machine.clock, min(self.profile.skew, NODE_SKEW))
        for _ in range(random.choice((2, 3, 3, 4))):
            self.start_client()
        profile = self.profile
        if self.servers:
            self._often(profile.crash, self._crash)
            self._often(profile.failover, self._fail_over)
            self._often(profile.amnesia, lambda: random.choice(self.servers).lose_memory())
            self._often(profile.demote, self._demote)
            self._often(profile.policy, self._change_policy)
            self._often(profile.step, self._step)
        for store in self.stores:
            self._often(profile.elect, store.cluster.elect)
        self._often(profile.wall_step, self._step_wall)
        self._often(profile.freeze, lambda: random.choice(self.machines).stop(random.expovariate(5 / TTL)))
        self._often(profile.die, self._die)
        self._often(profile.block, self._block)
        world.run(self.busy)
        self._calm_down()
        end = world.now + QUIET
        while world.now < end and not all(client.satisfied or client.dead for client in self.clients):
            world.run(world.now + 0.1)
        if world.now >= end:
            self.oracles.violated("stuck", f"not everybody got the lock within {QUIET:g} s of quiet")
        self.oracles.finish(self.machines, self.database)
        self.world.close()
        oracles = self.oracles
        trace = self.world.trace or []
        return Outcome("tests.simulation", self.profile, self.seed, oracles.violations, trace, oracles.figures)

    def start_client(self, idle: bool = False) -> Client:
        """Start a process without earlier knowledge; an *idle* one does nothing on its own."""
        client = Client(self, f"client {len(self.clients) + 1}")
        self._set(client.wall, self.profile.skew)
        client.steady.rate = client.wall.rate
        self.clients.append(client)
        for _ in range(0 if idle else self.world.random.choice((1, 1, 2))):
            client.spawn(client.work, self.database)
        return client

    def _set(self, clock: Clock, skew: float) -> None:
        random, rate = self.world.random, self.profile.rate
        if skew:
            clock.base = EPOCH + random.uniform(-skew, skew)
        if rate:
            clock.rate = 1 + random.uniform(-rate, rate)

    def _often(self, rate: float, happen: Callable[[], None]) -> None:
        """Let something happen at random moments."""
        if rate:
            time = self.world.random.expovariate(rate)
            while time < self.busy:
                self.world.at(time, happen)
                time += self.world.random.expovariate(rate)

    def _crash(self) -> None:
        random = self.world.random
        machine = random.choice(self.crashing)
        if machine.up:
            machine.crash(random.random() < self.profile.forget)
            self.world.at(self.world.now + random.expovariate(2 / TTL), machine.start)

    def _fail_over(self) -> None:
        """Cut a replica off, and some time later let it take its master's place."""
        random = self.world.random
        machine = random.choice(self.servers)
        machine.copy()
        self.world.at(self.world.now + random.expovariate(2 / TTL), machine.fail_over)

    def _demote(self) -> None:
        """Demote a node, and promote it again after another server has emptied it."""
        machine = self.world.random.choice(self.servers)
        machine.demote()
        self.world.at(self.world.now + self.world.random.expovariate(5 / TTL), machine.promote)

    def _change_policy(self) -> None:
        """
        Let a node evict keys for a while.

        The policy is announced for as long as a greeting counts and a lease lasts: what is evicted sooner may be lost.
        """
        world, machine = self.world, self.world.random.choice(self.servers)
        if not machine.evicts:
            machine.evicts = True
            first = world.now + OLD + TTL
            for later in range(4):
                world.at(first + later * world.random.random() * TTL, machine.evict)
            world.at(first + 4 * TTL, setattr, machine, "evicts", False)

    def _step(self) -> None:
        """Step clocks away and later back, within the profile's limit on how many are wrong at a time."""
        random, now = self.world.random, self.world.now
        right = [machine for machine in self.servers if not machine.wrong and now - machine.stepped > 3 * TTL]
        may = random.choice(self.profile.together) - (len(self.servers) - len(right))
        for machine in random.sample(right, max(may, 0)):
            seconds = random.choice((STEP, 2.0, 6.0)) * random.choice((1, 1, -1))
            shown = {client: offset for client in self.clients if (offset := client.offset(machine)) is not None}
            machine.set_clock(seconds)
            self.world.at(now + random.uniform(0.1, 2 * TTL), self._step_back, machine, seconds, shown)

    def _step_back(self, machine: Node, seconds: float, shown: dict[Client, float]) -> None:
        """
        Step a clock back, but not before all clients that knew it have seen the step.

        A step that is undone before a client looks leaves no trace for that client; see assumption A2.
        """
        blind = [client for client, offset in shown.items() if not (client.dead or client.sees_step(machine, offset))]
        if blind and "overlap" not in self.profile.tolerated:
            self.world.at(self.world.now + 0.01, self._step_back, machine, seconds, shown)
        else:
            machine.set_clock(-seconds)

    def _step_wall(self) -> None:
        client = self.world.random.choice(self.clients)
        seconds = self.world.random.choice((3600.0, 1.0, -1.0, -3600.0))
        self.world.log(client.name, "wall clock steps", seconds)
        client.wall.step(seconds)

    def _die(self) -> None:
        client = self.world.random.choice(self.clients)
        if not client.dead:
            client.kill()
            for session, name in client.sessions:
                # The server notices the end of the connection a little later.
                self.world.at(self.world.now + 0.2, self.database.end, session, name)
            self.start_client()

    def _block(self) -> None:
        random = self.world.random
        self.faults.block(random.choice(self.clients), random.choice(self.machines), random.expovariate(2 / TTL))

    def _calm_down(self) -> None:
        """End all hazards: nodes run, with the right time, and messages arrive."""
        self.world.log("world", "is quiet from now on")
        self.faults.on = False
        for machine in self.servers:
            machine.evicts = False
            machine.promote()
            machine.start()
        for client in self.clients:
            client.quiet = True


def run(profile: Profile, seed: int, traced: bool = False) -> Outcome:
    """Run one schedule."""
    return Schedule(profile, seed, traced).run()
