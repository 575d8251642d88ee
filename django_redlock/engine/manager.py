"""
The locks of one alias, blocking and asyncio: the decisions of :mod:`django_redlock.core`, carried out.

Public in a :class:`LockManager` are ``lock``, ``release``, ``extend``, ``aextend``, ``close`` and ``aclose``.
"""

import asyncio
import atexit
import logging
import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Unpack
from weakref import WeakSet, WeakValueDictionary

from ..core.acquisition import Acquisition, GaveUp, Step
from ..core.admission import Admission
from ..core.attempt import Granted
from ..core.backoff import Pause
from ..core.cleanup import cleanup
from ..core.hold import BATCH, Hold, batches, release_outcome, renewal
from ..core.names import check_names, named, slug
from ..core.outcome import Outcome
from ..core.owner import HolderKind, Owner
from ..core.replies import ANSWERS, Reply
from ..core.requests import Instant, Release
from ..core.round import Round
from ..core.rules import MIN_TTL, UNSET, Rules, Wait, check_label, check_wait, seconds
from ..core.surveying import SurveyOptions, survey_round
from ..core.tokens import HighestToken
from ..core.wanted import Wanted, check_limit
from ..nodes import Node
from ..nodes.clock import steady
from ..nodes.threads import exiting
from .driver import Driver
from .heartbeat import ProcessHeartbeat, this_process
from .lease import AsyncLease, Lease, note_extension
from .lease_hold import LASTING, LeaseHold
from .lock import Description, IfTaken, Lock
from .mistakes import explained
from .notifications import AsyncNotifications, Notifications
from .process import process
from .refused import error_of, explain_waiting
from .renewal import loop_watchdog, watchdog
from .surroundings import Surroundings

Notify = Callable[..., None]

log = logging.getLogger("django_redlock")
_HOST = socket.gethostname()


def fresh_nonce() -> str:
    """Return 128 random bits as 32 hexadecimal digits."""
    return os.urandom(16).hex()


def instant() -> Instant:
    """Read the clocks."""
    return Instant(steady(), time.time_ns() // 1000)


def silent(event: str, **about: Any) -> None:
    """Send no signal."""


def nothing() -> None:
    """Do nothing before a pause."""


class LockManager:
    """
    The locks of one alias, with its nodes, connections and options; there is one per alias and process.

    Args:
        nodes: The nodes that vote.
        rules: The options of the alias.
        alias: The alias in ``REDLOCK``.
        notify: Called with the name of a signal and its arguments.
        sleep: Blocks the calling thread for a number of seconds.
        asleep: Does the same for an asyncio task.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        rules: Rules,
        *,
        alias: str = "default",
        notify: Notify = silent,
        sleep: Callable[[float], None] = time.sleep,
        asleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    ) -> None:
        self.alias = alias
        self.retired = False  # whether the settings have changed since
        self.nodes = tuple(nodes)
        self.rules = rules
        self.notify = notify
        self.surroundings = Surroundings()
        self._sleep = sleep
        self._asleep = asleep
        self.entered: WeakValueDictionary[tuple[Any, ...], Lease] = WeakValueDictionary()
        self._highest = HighestToken()
        self.admission = Admission(rules, tuple(node.name for node in self.nodes), steady, time.time)
        self.dropped: deque[float] = deque(maxlen=1000)  # when leases end that were dropped without a release
        self.driver = Driver(alias, self.nodes, rules, self.admission, self._report, self._new_heartbeat)
        _managers.add(self)

    def __repr__(self) -> str:
        return f"<LockManager {self.alias!r}: {', '.join(node.name for node in self.nodes)}>"

    @explained
    def lock(
        self,
        name: str | Iterable[str],
        *,
        ttl: float | None = None,
        wait: Wait = UNSET,
        renew: bool | None = None,
        label: str = "",
        ref: str = "",
        kind: HolderKind = "manual",
        token: str = "",
        adopt: str = "",
        detached: bool = False,
        limit: int = 1,
        shared: bool = False,
        barge: bool = False,
        reentrant: bool = False,
        heartbeat: float | None = None,
        max_hold: float | None = None,
        cancel_on_lost: bool = False,
        on_commit: bool = False,
        if_taken: IfTaken = "raise",
    ) -> Lock:
        """
        Describe a lock; makes no network call.

        Args:
            name: What to lock, or several names to lock all or none of.
            ttl: Length of the lease in seconds; None is ``OPTIONS["ttl"]``.
            wait: How long to try, in seconds; 0 is one attempt, None is for ever. The default is ``OPTIONS["wait"]``.
            renew: Whether to extend it while it is held; None is ``OPTIONS["renew"]``.
            label: The holder's work, for people; never put a secret here.
            ref: What identifies the work to programs, such as a task's id.
            kind: ``manual``, ``task``, ``view``, ``model`` or ``command``, for people.
            token: Hold it with this secret instead of a fresh one: 32 hexadecimal digits, unique to one holder.
                For one ttl after an attempt that failed, nodes that did not answer it refuse the same secret.
            adopt: Take it over from the holder with this secret, if that holder still has it.
            detached: Neither renew nor watch it: it may last longer than ``max_ttl``, and its loss is not reported. For
                a lock that another process takes over with ``adopt``, and whose loss does no harm.
            limit: How many callers may hold it at once, from 1 to 1000.
            shared: Whether other shared holders may hold it at the same time; an exclusive holder may not.
            barge: Whether to ignore the queue and take the lock at once if it is free.
            reentrant: Whether the thread or task that holds it may take it again.
            heartbeat: Seconds without :meth:`Lease.heartbeat` after which it is no longer extended; None needs none.
            max_hold: The longest time for which it is renewed, in seconds; None is ``OPTIONS["max_hold"]``.
            cancel_on_lost: Whether to cancel the body of ``async with`` when the lock is lost.
            on_commit: Whether a ``with`` block inside a transaction keeps the lock until the transaction has ended.
            if_taken: Whether a decorated function raises (``raise``) or returns None (``skip``) when the lock is taken.

        Raises:
            TypeError: A name is not a string.
            ValueError: A name, ttl or wait cannot work; the message says what to write.
        """
        chosen = self._ttl(ttl, detached)
        renew = self.rules.renew if renew is None else renew
        # A lock that is not renewed depends on no process: whoever has its secret may go on with it until it ends.
        renewed_by = process.name if renew and not detached else ""
        owner = Owner(_HOST, process.pid, kind, label, ref, ttl=chosen, process=renewed_by)
        names = check_names(name)
        check_label(label)
        check_limit(limit, names, shared)
        if heartbeat is not None:
            seconds("heartbeat", heartbeat)
        if max_hold is not None:
            seconds("max_hold", max_hold)
        given = check_wait(wait)
        tried = self.rules.wait if given is UNSET else given
        wanted = Wanted(names, chosen, tried, owner, token, adopt, detached, limit, shared, barge, heartbeat, max_hold)
        described = Description(self, wanted, renew, once=given is UNSET)
        return Lock(names, lambda: described, reentrant, cancel_on_lost, on_commit, if_taken)

    def left_alone(
        self,
        name: str,
        *,
        ttl: float,
        kind: HolderKind,
        label: str,
        ref: str,
        token: str,
        adopt: str = "",
        strict: bool = False,
    ) -> Wanted:
        """
        Describe one attempt at a lock with ``detached=True``, for :meth:`run`; the arguments are those of :meth:`lock`.

        A caller that takes the lock and goes away needs neither a :class:`Lock` nor a :class:`Lease`.

        Args:
            strict: Whether it must be taken over, from *adopt* or from an earlier hold with the same *token*; a free
                lock is refused like a taken one.

        Raises:
            ValueError: The name or the ttl cannot work.
        """
        chosen = self._ttl(ttl, detached=True)
        owner = Owner(_HOST, process.pid, kind, label, ref, ttl=chosen)
        return Wanted(check_names(name), chosen, 0, owner, token, adopt, detached=True, strict=strict)

    def release(self, name: str | Iterable[str], token: str) -> Outcome:
        """
        Release a lock by its secret, in any process; returns what :meth:`Lease.release` returns.

        Only the holder with this secret loses the lock. That holder must be dead or must not renew: the next renewal of
        a living holder restores the lock. If a node misses the release, the release is redelivered in the background
        for a day, because a lock that is not renewed may last for long.
        """
        process.notice_fork()
        slugs = tuple(slug(name) for name in check_names(name))
        timeout = self.rules.timeout(self.rules.ttl)
        round = cleanup(Release(slugs, token), range(self.rules.nodes), (), 0.0, timeout, self.rules.needed)
        round.lasting = LASTING
        self.ask(round)
        return release_outcome(round, self.rules)

    def survey(self, **options: Unpack[SurveyOptions]) -> dict[int, Reply]:
        """
        Ask the nodes for the locks named, or for one page of their indexes.

        Args:
            **options: Those of :class:`~django_redlock.core.surveying.SurveyOptions`.

        Returns:
            The replies that came in time, by the node's index.
        """
        process.notice_fork()
        round = survey_round(self.rules, options)
        self.ask(round)
        return round.replies

    async def asurvey(self, **options: Unpack[SurveyOptions]) -> dict[int, Reply]:
        """Do what :meth:`survey` does without blocking."""
        process.notice_fork()
        round = survey_round(self.rules, options)
        await self.aask(round)
        return round.replies

    def close(self) -> None:
        """Close all idle connections; the manager can be used again and then connects anew."""
        self.driver.close()

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self.driver.aclose()

    def ask(self, round: Round) -> None:
        """Carry out one round, blocking; a release that does not reach a node is redelivered in the background."""
        self.driver.ask(round)

    async def aask(self, round: Round) -> None:
        """Do what :meth:`ask` does in the running event loop."""
        await self.driver.aask(round)

    def bring(self, round: Round) -> None:
        """Have a release redelivered to the nodes that have not answered it; makes no network call."""
        self.driver.bring(round)

    def _outcome(self, wanted: Wanted, outcome: Granted | GaveUp) -> Granted | GaveUp:
        if isinstance(outcome, Granted) and wanted.adopt not in ("", outcome.nonce):
            self._took_over(wanted, outcome)
        return outcome

    def _took_over(self, wanted: Wanted, granted: Granted) -> None:
        """
        End the hold that was taken over on all nodes.

        Nodes that missed the round would keep that hold until it ends by itself. The release that is redelivered to
        them ends it and leaves a tombstone, in case that the request for that hold is still on its way.
        """
        round = granted.rounds[0]
        end = Release(granted.slugs, wanted.adopt, self.rules.guard)
        round.remedy, round.lasting = dict.fromkeys(round.requests, end), LASTING
        self.driver.follow_up(round)

    def acquisition(self, wanted: Wanted, waiter: str = "") -> Acquisition:
        """Return the steps that take a lock; *waiter* is its name in the queues of the nodes."""
        if wanted.owner.pid != process.pid:  # a lock that was made before the process forked
            owner = wanted.owner._replace(pid=process.pid, process=wanted.owner.process and process.name)
            wanted = wanted._replace(owner=owner)
        return Acquisition(wanted, self.rules, self._highest, fresh_nonce, random.random, waiter)

    def take(
        self, wanted: Wanted, renew: bool, note: Callable[[Lease], object], waiting: Callable[[], object] = nothing
    ) -> Lease:
        """
        Take a lock and return its lease.

        Args:
            wanted: The lock to take.
            renew: Whether to extend it while it is held.
            note: Called with the lease before the caller has it.
            waiting: Called before each pause of a caller that waits in the queue.
        """
        outcome: Granted | GaveUp | None = None
        lease = None
        try:
            outcome = self.run(wanted, waiting)
            lease = self.held(wanted, outcome, renew)
            note(lease)
            return lease
        except BaseException:
            if lease is not None:  # interrupted: the caller does not get the lease
                lease.release()
            elif isinstance(outcome, Granted):
                self.ask(Hold(wanted, outcome, self.rules, self._highest).release(self.rules.timeout(wanted.ttl)))
            raise

    async def atake(
        self, wanted: Wanted, renew: bool, note: Callable[[Lease], object], waiting: Callable[[], object] = nothing
    ) -> Lease:
        """Do what :meth:`take` does without blocking."""
        outcome: Granted | GaveUp | None = None
        lease = None
        try:
            outcome = await self.arun(wanted, waiting)
            lease = self.aheld(wanted, outcome, renew)
            note(lease)
            return lease
        except BaseException:
            if lease is not None:
                lease.hold.abandon()
            elif isinstance(outcome, Granted):
                self.driver.send(Hold(wanted, outcome, self.rules, self._highest).release(0.0))
            raise

    def run(self, wanted: Wanted, waiting: Callable[[], object] = nothing) -> Granted | GaveUp:
        """Try to take a lock, blocking the calling thread."""
        if exiting():
            raise RuntimeError(f"Lock {named(wanted.names)!r} cannot be taken: the interpreter is about to end.")
        process.notice_fork()
        self.driver.notice_fork()
        notifications = self.driver.notifications
        acquisition = self.acquisition(wanted, notifications.waiters.new_name() if wanted.wait != 0 else "")
        try:
            try:
                outcome = self._carry_out(acquisition, notifications, waiting)
            finally:
                notifications.waiters.leave(acquisition.waiter)
            return self._outcome(wanted, outcome)
        except BaseException:
            # The connections of the interrupted round were closed, so this makes new ones.
            self.ask(acquisition.undo(self.rules.timeout(wanted.ttl, len(wanted.names))))
            raise

    def _carry_out(
        self, acquisition: Acquisition, notifications: Notifications, waiting: Callable[[], object]
    ) -> Granted | GaveUp:
        notifications.waiters.expect(acquisition.waiter)
        steps = acquisition.steps(instant())
        try:
            step = next(steps)
            while True:
                if not isinstance(step, Pause):
                    self.ask(step)
                elif acquisition.waiter.name:
                    explain_waiting(self.nodes, acquisition, step)
                    waiting()
                    notifications.wait(acquisition.waiter, step.seconds, step.told)
                else:
                    self._sleep(step.seconds)
                step = steps.send(instant())
        except StopIteration as stop:
            outcome: Granted | GaveUp = stop.value
            return outcome

    async def arun(self, wanted: Wanted, waiting: Callable[[], object] = nothing) -> Granted | GaveUp:
        """Try to take a lock in the running event loop."""
        process.notice_fork()
        side = self.driver.loop_side()
        acquisition = self.acquisition(wanted, side.notifications.waiters.new_name() if wanted.wait != 0 else "")
        try:
            try:
                outcome = await self._acarry_out(acquisition, side.notifications, waiting)
            finally:
                side.notifications.waiters.leave(acquisition.waiter)
            return self._outcome(wanted, outcome)
        except BaseException:
            self.driver.send(acquisition.undo())
            raise

    async def _acarry_out(
        self, acquisition: Acquisition, notifications: AsyncNotifications, waiting: Callable[[], object]
    ) -> Granted | GaveUp:
        notifications.waiters.expect(acquisition.waiter)
        steps = acquisition.steps(instant())
        try:
            step: Step = next(steps)
            while True:
                if not isinstance(step, Pause):
                    await self.aask(step)
                elif acquisition.waiter.name:
                    explain_waiting(self.nodes, acquisition, step)
                    waiting()
                    await notifications.wait(acquisition.waiter, step.seconds, step.told)
                else:
                    await self._asleep(step.seconds)
                step = steps.send(instant())
        except StopIteration as stop:
            outcome: Granted | GaveUp = stop.value
            return outcome

    def extend(self, leases: Sequence[Lease], ttl: float | None = None) -> int:
        """
        Extend leases, at most a hundred in one round; returns how many are longer now.

        Args:
            leases: Leases of this manager.
            ttl: Length of the leases from now on, in seconds; None keeps the length of each.
        """
        longer = 0
        for round, chosen in self._renewals(leases, ttl):
            start = steady()
            self.ask(round)
            longer += note_extension(round, chosen, start)
        return longer

    async def aextend(self, leases: Sequence[Lease], ttl: float | None = None) -> int:
        """Do what :meth:`extend` does without blocking."""
        longer = 0
        for round, chosen in self._renewals(leases, ttl):
            start = steady()
            await self.aask(round)
            longer += note_extension(round, chosen, start)
        return longer

    def _renewals(self, leases: Sequence[Lease], ttl: float | None) -> Iterator[tuple[Round, list[Lease]]]:
        """Yield each round and the leases that it extends; a lease that ended meanwhile is in none."""
        for first in range(0, len(leases), BATCH):
            now = steady()
            some = [lease for lease in leases[first : first + BATCH] if lease.valid()]
            asked = [(lease, term) for lease in some if (term := lease.hold.term(now, ttl))]
            for numbers in batches([term for _, term in asked]):
                chosen = [asked[number] for number in numbers]
                soonest = min(lease.hold.deadline for lease, _ in chosen)
                shortest = min(lease.hold.timeout for lease, _ in chosen)
                round = renewal([term for _, term in chosen], self.rules, shortest, soonest - now)
                for lease, term in chosen:
                    lease.hold.asked(round, term)
                yield round, [lease for lease, _ in chosen]
                if round.count(*ANSWERS) < round.needed:
                    return  # the nodes are silent: leases of other aliases come first

    def held(self, wanted: Wanted, outcome: Granted | GaveUp, renew: bool) -> Lease:
        """Return the lease of a won acquisition; raises if the acquisition gave up."""
        lease = Lease(self.hold(wanted, outcome, renew))
        try:
            if not wanted.detached:
                watchdog.watch(lease)
                self.driver.heartbeat.join()
            self.notify("lock_acquired", lease=lease)
            return lease
        except BaseException:  # or it would be renewed for as long as the traceback refers to it
            lease.hold.abandon()
            raise

    def aheld(self, wanted: Wanted, outcome: Granted | GaveUp, renew: bool) -> Lease:
        """Do what :meth:`held` does for the running event loop."""
        lease = AsyncLease(self.hold(wanted, outcome, renew))
        try:
            if not wanted.detached:
                loop_watchdog().watch(lease)
                self.driver.loop_side().heartbeat.join()
            self.notify("lock_acquired", lease=lease)
            return lease
        except BaseException:
            lease.hold.abandon()
            raise

    def _ttl(self, ttl: float | None, detached: bool) -> float:
        if ttl is None:
            return self.rules.ttl
        return max(MIN_TTL, seconds("ttl", ttl)) if detached else self.rules.check_ttl(ttl)

    def hold(self, wanted: Wanted, outcome: Granted | GaveUp, renew: bool) -> LeaseHold:
        """
        Return the hold of a won acquisition.

        Raises:
            LockTakenError: Another owner kept the lock.
            QuorumUnavailableError: Too few nodes answered.
        """
        if isinstance(outcome, GaveUp):
            error = error_of(self.nodes, self.rules, wanted, outcome)
            self.notify("lock_taken", name=error.name, error=error)
            raise error
        return LeaseHold(self, wanted, outcome, self._highest, renew)

    def _report(self, event: str, **about: Any) -> None:
        self.notify(event, **about)  # which may be another function by now

    def _new_heartbeat(self, dog: Callable[[], Any]) -> ProcessHeartbeat:
        return ProcessHeartbeat(self, this_process(_HOST, process.name), dog, steady, self.dropped)


_managers: WeakSet[LockManager] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Close the idle connections of this process; locks still held are left to end by themselves."""
    for manager in list(_managers):
        manager.close()
