"""
The locks of one alias, blocking and asyncio: the decisions of :mod:`django_redlock.core`, carried out (internal).

The public methods of a :class:`LockManager` are ``lock``, ``release``, ``extend``, ``aextend``, ``close`` and
``aclose``.
"""

import atexit
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Unpack, overload
from weakref import WeakSet, WeakValueDictionary

from ..core.acquisition import Acquisition, GaveUp, Pause
from ..core.admission import Admission
from ..core.attempt import Granted, HighestToken
from ..core.hold import BATCH, batches
from ..core.names import HolderKind, Owner, about_holder, check_names, named, slug
from ..core.protocol import ANSWERS, Outcome, Release, Reply, Term
from ..core.round import Round, SurveyOptions
from ..core.rules import MIN_TTL, UNSET, QueuePlace, ReleaseMode, Rules, Wanted, seconds
from ..core.votes import is_quorum, release_outcome, votes_in
from ..exceptions import LockTakenError, QuorumUnavailableError, printable
from ..nodes import Node
from ..runtime.process import HOST, process
from ..runtime.threads import exiting
from .confirmations import Confirmations
from .driver import Driver, LoopSide
from .lease import LONGEST_REDELIVERY, AsyncLease, Lease, LeaseHold, note_extension
from .lock import Description, Lock
from .notifications import Waiters
from .options import BlockOptions, LockOptions, Plan, SkippingOptions, lists_options, plan
from .reentrancy import remember
from .watchdog import NEVER, REAL, Runtime

if TYPE_CHECKING:
    from .lock import SkippingLock

Notify = Callable[..., None]

AT_END: Mapping[str, ReleaseMode] = {"task": "send", "view": "send"}
"""The release mode at the end of a hold of each kind, unless the lock or the settings choose; other kinds wait."""


log = logging.getLogger("django_redlock")


def silent(event: str, **about: Any) -> None:
    """Send no signal."""


class Surroundings:
    """The event loop and the transactions of the calling thread, as a framework knows them; this class knows none."""

    def blocking(self) -> None:
        """Raise if the calling thread must not block, because it runs an event loop."""

    def entering(self, names: tuple[str, ...], rules: Rules, on_commit: bool = False) -> None:
        """
        Warn or raise if a transaction is open that would end only after the lock *names* is released.

        With *on_commit*, raise if the end of a transaction could not be noticed.
        """

    def keep(self, lease: Lease) -> bool:
        """Have *lease* released when the open transactions have ended; return whether any is open."""
        return False


class LockManager:
    """
    The locks of one alias, with its nodes, connections and options; there is one per alias and process.

    Args:
        nodes: The nodes that vote.
        rules: The options of the alias.
        alias: The alias in ``REDLOCK``.
        notify: Called with the name of a signal and its arguments.
        runtime: The clocks, pauses and watchdogs; a simulation passes others.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        rules: Rules,
        *,
        alias: str = "default",
        notify: Notify = silent,
        runtime: Runtime = REAL,
    ) -> None:
        self.alias = alias
        self.replaced = False  # whether another one is given out for the alias now, by new settings or by a test
        self.elsewhere = False  # whether its locks are those of another process, which a simulation plays
        self.nodes = tuple(nodes)
        self.rules = rules
        self.notify = notify
        self.runtime = runtime
        self.surroundings = Surroundings()
        admission = Admission(rules, tuple(node.name for node in self.nodes), runtime.clock, runtime.wall)
        self.driver = Driver(alias, self.nodes, rules, admission, runtime, self._report, keeper=self)
        self.acquirer = Acquirer(self)
        at_once = all(node.instant for node in self.nodes)
        self.confirmations = Confirmations(rules, runtime, self.driver.ask, at_once=at_once)
        self._descriptions: Callable[[Plan], Description] = lru_cache(maxsize=1024)(self._describe)
        _managers.add(self)

    def __repr__(self) -> str:
        return f"<LockManager {self.alias!r}: {', '.join(node.name for node in self.nodes)}>"

    def describe(self, plan: Plan) -> Description:
        """Return a lock under the options of this alias; the plans of locks with one name are the same every time."""
        return self._descriptions(plan) if len(plan.names) == 1 else self._describe(plan)

    @overload
    def lock(
        self, name: str | Iterable[str], *, if_taken: Literal["skip"], **options: Unpack[SkippingOptions]
    ) -> "SkippingLock": ...

    @overload
    def lock(
        self, name: str | Iterable[str], *, if_taken: Literal["raise"] = "raise", **options: Unpack[BlockOptions]
    ) -> Lock: ...

    @lists_options
    def lock(self, name: str | Iterable[str], **options: Any) -> Lock:
        """
        Describe a lock, without a network call.

        Args:
            name: What to lock, or several names to lock all or none of.
            **options: Those of :func:`django_redlock.lock`, which describes each.

        Raises:
            TypeError: A name is not a string.
            ValueError: A name, ttl or wait cannot work; the message says what to write.
        """
        planned = plan(name, options)  # type: ignore[arg-type]  # the overloads say which options there are
        self.describe(planned)  # tells what the settings do not allow
        return Lock(planned, self.describe)

    def on_behalf(
        self,
        name: str | Iterable[str],
        owner: Owner | None = None,
        *,
        secret: str = "",
        adopt: str = "",
        detached: bool = False,
        place: QueuePlace | None = None,
        **options: Unpack[LockOptions],
    ) -> Lock:
        """
        Describe a lock for the parts of this package that hold it on behalf of a task, a view or a command (internal).

        Args:
            name: What to lock, or several names to lock all or none of.
            owner: What :func:`owner_here` returns; None is a holder like those of :meth:`lock`. Its kind decides the
                release mode if neither the lock nor the settings choose one: the end of a task's run or of a view may
                then send the release without waiting.
            secret: The secret to hold the lock with instead of a fresh one: 32 hexadecimal digits, unique to one
                holder. For one ttl after an attempt that failed, nodes that did not answer it refuse the same secret.
            adopt: The secret of a holder to take the lock over from, if that holder still has it.
            detached: Whether the lock is neither renewed nor watched: it may last longer than ``max_ttl``, and its loss
                is not reported. This is for a lock that another process takes over with ``adopt``, and whose loss does
                no harm.
            place: The place in the queue that is kept if the lock is taken.
            **options: Those of :meth:`lock`.
        """
        planned = plan(name, options)
        described = self._describe(planned, owner, secret, adopt, detached, place)
        return Lock(planned, lambda _: described)

    def _describe(
        self,
        plan: Plan,
        owner: Owner | None = None,
        secret: str = "",
        adopt: str = "",
        detached: bool = False,
        place: QueuePlace | None = None,
    ) -> Description:
        """Return the lock that *plan* describes under the settings of this alias."""
        chosen = plan.options
        ttl = self.rules.ttl if chosen["ttl"] is None else chosen["ttl"]
        ttl = max(MIN_TTL, seconds("ttl", ttl)) if detached else self.rules.check_ttl(ttl)
        renew = self.rules.renew if chosen["renew"] is None else chosen["renew"]
        # A lock that is not renewed depends on no process: any process with its secret may use it until it ends.
        renewed_by = process.name if renew and not detached else ""
        owner = (owner or owner_here("manual", chosen["label"]))._replace(
            ttl=ttl, process=renewed_by, hold=float(chosen["hold_for"])
        )
        wait = chosen["wait"]
        wanted = Wanted(
            plan.names,
            ttl,
            self.rules.wait if wait is UNSET else wait,
            owner,
            secret,
            adopt,
            detached,
            chosen["limit"],
            chosen["shared"],
            chosen["barge"],
            chosen["heartbeat"],
            chosen["max_hold"],
            sends=(chosen["release"] or self.rules.release or AT_END.get(owner.kind, "wait")) == "send",
            place=place,
            hold_for=owner.hold,
            hold_on_error=chosen["hold_on_error"],
        )
        return Description(self, wanted, renew, once=wait is UNSET)

    def release(
        self, name: str | Iterable[str], secret: str, tombstone: float = 0.0, *, revoke: bool = False
    ) -> Outcome:
        """
        Release a lock by its secret, in any process; return what :meth:`Lease.release` returns.

        Only the holder with this secret loses the lock. That holder must be dead or must not renew: the next renewal of
        a living holder restores the lock. If a node misses the release, the release is redelivered in the background
        for a day, because a lock that is not renewed may last for long.

        Args:
            name: The lock's name, or several names.
            secret: The holder's secret.
            tombstone: Seconds for which the nodes refuse late requests with this secret.
            revoke: Whether the holder, if it asks the nodes within that time, learns that an operator took the lock
                away.
        """
        return self.release_slugs(tuple(slug(name) for name in check_names(name)), secret, tombstone, revoke=revoke)

    def release_slugs(
        self, slugs: tuple[str, ...], secret: str, tombstone: float = 0.0, *, queue: str = "", revoke: bool = False
    ) -> Outcome:
        """Do what :meth:`release` does, by the names in the keys; *queue* is that of a permit's lock (internal)."""
        process.notice_fork()
        timeout = self.rules.timeout(self.rules.ttl)
        release = Release(slugs, secret, tombstone, queue=queue, revoke=revoke)
        nodes = range(self.rules.nodes)
        round = Round.to_release(release, nodes, timeout, self.rules.needed, lasting=LONGEST_REDELIVERY)
        self.driver.ask(round)
        return release_outcome(round.replies, self.rules)

    def new_waiter(self, label: str) -> str:
        """Return a name for somebody who waits in this process, and keeps a place in a queue over several attempts."""
        process.notice_fork()
        self.driver.notice_fork()
        return self.driver.notifications.waiters.new_name(label)

    def leave_queue(self, name: str, waiter: str) -> None:
        """Give up the place in a queue of somebody who does not come back; otherwise it ends with its time."""
        process.notice_fork()
        leaving = Release((slug(name),), fresh_secret(), leaving=waiter)
        self.driver.ask(Round.to_release(leaving, range(self.rules.nodes), self.rules.timeout(self.rules.ttl)))

    def survey(self, **options: Unpack[SurveyOptions]) -> dict[int, Reply]:
        """
        Ask the nodes for the locks with given names, or for one page of their indexes.

        A node whose link may have been cut is asked once more, over a new link.

        Args:
            **options: Those of :class:`~django_redlock.core.round.SurveyOptions`.

        Returns:
            The replies that came in time, by the node's index.
        """
        process.notice_fork()
        replies: dict[int, Reply] = {}
        for round in self._surveys(options):
            self.driver.ask(round)
            replies |= round.replies
        return replies

    async def asurvey(self, **options: Unpack[SurveyOptions]) -> dict[int, Reply]:
        """Do what :meth:`survey` does without blocking."""
        process.notice_fork()
        replies: dict[int, Reply] = {}
        for round in self._surveys(options):
            await self.driver.aask(round)
            replies |= round.replies
        return replies

    def _surveys(self, options: SurveyOptions) -> Iterator[Round]:
        """Yield the round of a survey, and, if links may have been cut, another one over new links; see Round.cut."""
        round = Round.to_survey(self.rules, options)
        yield round
        if cut := round.cut:
            yield Round.to_survey(self.rules, {**options, "but": set(range(self.rules.nodes)) - cut})

    def close(self) -> None:
        """Close all idle connections; the manager can be used again and then connects anew."""
        self.confirmations.send(float("inf"))
        self.driver.close()

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self.driver.aclose()

    def extend(self, leases: Sequence[Lease], ttl: float | None = None) -> int:
        """
        Extend leases, at most a hundred in one round; return how many are longer now.

        Args:
            leases: Leases of this manager.
            ttl: Length of the leases from now on, in seconds; None keeps the length of each.

        Raises:
            ValueError: The ttl cannot work; the message says what to write.
        """
        longer = 0
        for round, chosen in self._renewals(leases, ttl):
            start = self.runtime.clock()
            self.driver.ask(round)
            longer += note_extension(round, chosen, start)
        return longer

    async def aextend(self, leases: Sequence[Lease], ttl: float | None = None) -> int:
        """Do what :meth:`extend` does without blocking."""
        longer = 0
        for round, chosen in self._renewals(leases, ttl):
            start = self.runtime.clock()
            await self.driver.aask(round)
            longer += note_extension(round, chosen, start)
        return longer

    def _renewals(self, leases: Sequence[Lease], ttl: float | None) -> Iterator[tuple[Round, list[Lease]]]:
        """Yield each round and the leases that it extends; a lease that ended meanwhile is in none."""
        ttl = None if ttl is None else self.rules.check_ttl(ttl)
        for first in range(0, len(leases), BATCH):
            now = self.runtime.clock()
            some = [lease for lease in leases[first : first + BATCH] if lease.valid()]
            asked = [(lease, term) for lease in some if (term := lease.hold.term(now, ttl))]
            for numbers in batches([term for _, term in asked]):
                chosen = [asked[number] for number in numbers]
                round = self._renewal(chosen, now, ttl)
                yield round, [lease for lease, _ in chosen]
                if not is_quorum(round.count(*ANSWERS), round.needed) and round.cut:
                    # Once more, over new links; see Acquisition._was_cut.
                    now = self.runtime.clock()
                    chosen = [(lease, term) for lease, _ in chosen if (term := lease.hold.term(now, ttl))]
                    if chosen:
                        round = self._renewal(chosen, now, ttl)
                        yield round, [lease for lease, _ in chosen]
                if not is_quorum(round.count(*ANSWERS), round.needed):
                    return  # the nodes are silent: do not delay the leases of other aliases

    def _renewal(self, chosen: Sequence[tuple[Lease, Term]], now: float, ttl: float | None) -> Round:
        """Return the round that extends some leases by their terms."""
        soonest = min(lease.hold.deadline for lease, _ in chosen)
        shortest = min(lease.hold.timeout for lease, _ in chosen)
        round = Round.to_extend([term for _, term in chosen], self.rules, shortest, soonest - now)
        for lease, term in chosen:
            lease.hold.asked(round, term)
            if ttl is not None and lease.hold.tended:
                lease.watch()
        return round

    def _report(self, event: str, **about: Any) -> None:
        self.notify(event, **about)  # looked up now, because it may have been replaced


_managers: WeakSet[LockManager] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Close the idle connections of this process; locks still held are left to end by themselves."""
    process.ends = True
    # Kept to the very end: the tasks of an event loop that was only closed would complain when they are destroyed.
    process.kept = list(_managers)
    for manager in process.kept:
        manager.close()


def owner_here(
    kind: HolderKind, label: str = "", ref: str = "", *, ttl: float = 0.0, state: str = "", call: str = ""
) -> Owner:
    """Return the description of a holder in this process; the arguments are those of :class:`~.names.Owner`."""
    return Owner(HOST, process.pid, kind, label, ref, 0.0, ttl, "", 0, state, call)


def fresh_secret() -> str:
    """Return 128 random bits as 32 hexadecimal digits."""
    return os.urandom(16).hex()


class Acquirer:
    """
    Takes the locks of one alias, blocking and asyncio.

    Args:
        manager: The manager that extends and releases the leases.
    """

    def __init__(self, manager: LockManager) -> None:
        self._manager = manager
        self._driver = manager.driver
        self._nodes = manager.nodes
        self._rules = manager.rules
        self._highest = HighestToken()
        self.entered: WeakValueDictionary[tuple[Any, ...], Lease] = WeakValueDictionary()
        """The leases of reentrant locks, by name and thread or task."""

    def _waiter_of(self, wanted: Wanted, waiters: "Waiters[Any]") -> str:
        """Return the caller's name in the nodes' queues; empty if it makes one attempt and joins no queue."""
        if wanted.place:
            return wanted.place.waiter
        return waiters.new_name(wanted.owner.label) if wanted.wait != 0 else ""

    def acquisition(self, wanted: Wanted, waiter: str = "") -> Acquisition:
        """Return the steps that take a lock; *waiter* is the caller's name in the nodes' queues."""
        if wanted.owner.pid != process.pid:  # the lock was described before the process forked
            owner = wanted.owner._replace(pid=process.pid, process=wanted.owner.process and process.name)
            wanted = wanted._replace(owner=owner)
        return Acquisition(wanted, self._rules, self._highest, fresh_secret, self._manager.runtime.random, waiter)

    def take(
        self,
        wanted: Wanted,
        renew: bool,
        who: object,
        reentrant: bool = False,
        waiting: Callable[[], object] | None = None,
    ) -> Lease:
        """
        Take a lock and return its lease.

        Args:
            wanted: The lock to take.
            renew: Whether to extend it while it is held.
            who: The thread or task that takes it.
            reentrant: Whether *who* may enter it again.
            waiting: Called before each pause of a caller that waits in the queue.
        """
        return self.held(wanted, self.run(wanted, waiting), renew, who, reentrant)

    async def atake(
        self,
        wanted: Wanted,
        renew: bool,
        who: object,
        reentrant: bool = False,
        waiting: Callable[[], object] | None = None,
    ) -> Lease:
        """Do what :meth:`take` does without blocking."""
        return self.held(wanted, await self.arun(wanted, waiting), renew, who, reentrant, self._driver.loop_side())

    def run(self, wanted: Wanted, waiting: Callable[[], object] | None = None) -> Granted | GaveUp:
        """Try to take a lock, blocking the calling thread."""
        if exiting():
            raise RuntimeError(f"Lock {named(wanted.names)!r} cannot be taken: the interpreter is about to end.")
        if not process.mark[0]:
            process.notice_fork()
        manager, driver = self._manager, self._driver
        instant, pause = manager.runtime.instant, manager.runtime.sleep
        if driver.pid != process.pid:
            driver.notice_fork()
        notifications = driver.notifications
        acquisition = self.acquisition(wanted, self._waiter_of(wanted, notifications.waiters))
        waiter = acquisition.waiter
        try:
            if waiter.name:
                notifications.waiters.expect(waiter)
            steps = acquisition.steps(instant())
            try:
                step = next(steps)
                while True:
                    if not isinstance(step, Pause):
                        driver.ask(step)
                    elif waiter.name:
                        explain_waiting(self._nodes, acquisition, step)
                        if waiting and not step.silent:
                            waiting()
                        notifications.wait(waiter, step.seconds, step.notified)
                    else:
                        pause(step.seconds)
                    step = steps.send(instant())
            except StopIteration as stop:
                outcome: Granted | GaveUp = stop.value
                return self._took_over(wanted, outcome) if wanted.adopt else outcome
        except BaseException:
            # The connections of the interrupted round were closed, so this makes new ones.
            driver.ask(acquisition.undo(self._rules.timeout(wanted.ttl, len(wanted.names))))
            raise
        finally:
            if waiter.name:
                notifications.waiters.leave(waiter)

    async def arun(self, wanted: Wanted, waiting: Callable[[], object] | None = None) -> Granted | GaveUp:
        """Try to take a lock in the running event loop."""
        if not process.mark[0]:
            process.notice_fork()
        manager, driver = self._manager, self._driver
        instant, pause = manager.runtime.instant, manager.runtime.asleep
        notifications = driver.loop_side().notifications
        acquisition = self.acquisition(wanted, self._waiter_of(wanted, notifications.waiters))
        waiter = acquisition.waiter
        try:
            if waiter.name:
                notifications.waiters.expect(waiter)
            steps = acquisition.steps(instant())
            try:
                step = next(steps)
                while True:
                    if not isinstance(step, Pause):
                        await driver.aask(step)
                    elif waiter.name:
                        explain_waiting(self._nodes, acquisition, step)
                        if waiting and not step.silent:
                            waiting()
                        await notifications.wait(waiter, step.seconds, step.notified)
                    else:
                        await pause(step.seconds)
                    step = steps.send(instant())
            except StopIteration as stop:
                outcome: Granted | GaveUp = stop.value
                return self._took_over(wanted, outcome) if wanted.adopt else outcome
        except BaseException:
            driver.send(acquisition.undo())
            raise
        finally:
            if waiter.name:
                notifications.waiters.leave(waiter)

    def held(
        self,
        wanted: Wanted,
        outcome: Granted | GaveUp,
        renew: bool,
        who: object = UNSET,
        reentrant: bool = False,
        loop_side: LoopSide | None = None,
    ) -> Lease:
        """
        Return the lease of a won acquisition.

        Args:
            wanted: The lock.
            outcome: The outcome of the acquisition.
            renew: Whether to extend the lock while it is held.
            who: The thread or task that has taken it; not passed if nobody may enter it.
            reentrant: Whether *who* may enter it again.
            loop_side: That of the event loop that the lease belongs to; None if it belongs to threads.

        Raises:
            LockTakenError: Another owner kept the lock.
            QuorumUnavailableError: Too few nodes answered.
        """
        if isinstance(outcome, GaveUp):
            self._refuse(wanted, outcome)
        lease = (AsyncLease if loop_side else Lease)(LeaseHold(self._manager, wanted, outcome, self._highest, renew))
        try:
            if lease.hold.tended:
                runtime = self._manager.runtime
                (runtime.loop_watchdog() if loop_side else runtime.watchdog).watch(lease)
                heartbeat = (loop_side or self._driver).heartbeat
                if heartbeat.next_sign is NEVER:
                    heartbeat.join()
            self._manager.notify("lock_acquired", lease=lease)
            if who is not UNSET:
                if reentrant:
                    self.entered[wanted.names, wanted.limit, wanted.shared, who] = lease
                remember(lease, who)
            return lease
        except BaseException:  # otherwise the lease would be renewed for as long as the traceback refers to it
            lease.hold.never_began()
            lease.hold.abandon()
            raise

    def _refuse(self, wanted: Wanted, outcome: GaveUp) -> NoReturn:
        error = error_of(self._nodes, self._rules, wanted, outcome)
        self._manager.notify("lock_taken", name=error.name, error=error)
        raise error

    def _took_over(self, wanted: Wanted, outcome: Granted | GaveUp) -> Granted | GaveUp:
        """
        If a hold was taken over, end it on all nodes.

        A node that missed the round would keep that hold until it ends by itself. The release that is redelivered to
        the node ends the hold and leaves a tombstone, in case the request for the hold is still on its way.
        """
        if isinstance(outcome, Granted) and wanted.adopt != outcome.secret:
            end = Release(outcome.slugs, wanted.adopt, self._rules.guard)
            for round in outcome.rounds:
                round.take_over(end, LONGEST_REDELIVERY)
                self._driver.follow_up(round)
        return outcome


def error_of(
    nodes: Sequence[Node], rules: Rules, wanted: Wanted, outcome: GaveUp
) -> LockTakenError | QuorumUnavailableError:
    """Return the error of an acquisition that gave up: the lock is taken, or too few nodes answered."""
    name = named(wanted.names)
    reported = {node.name: str(outcome.replies.get(number, "not waited for")) for number, node in enumerate(nodes)}
    if not outcome.taken:
        after = votes_in(outcome.replies.values(), rules.needed) or None
        votes = (rules.needed, outcome.misconfigured, after)
        return QuorumUnavailableError(name, outcome.waited, outcome.attempts, reported, *votes)
    why = (outcome.retry_after, about_holder(outcome.holder), outcome.queued, outcome.agreed, outcome.ahead)
    return LockTakenError(name, outcome.waited, outcome.attempts, reported, *why)


def explain_waiting(nodes: Sequence[Node], acquisition: Acquisition, pause: Pause) -> None:
    """Log, once per acquisition, that the caller waits for nodes rather than for another holder."""
    if pause.silent and not acquisition.explained:
        acquisition.explained = True
        reported = ", ".join(f"{nodes[node].name}: {reply}" for node, reply in sorted(pause.silent.items()))
        name = named(acquisition.wanted.names)
        log.warning(
            "lock %s waits for a quorum: %s", printable(name), reported, extra={"event": "no_quorum", "lock": name}
        )
