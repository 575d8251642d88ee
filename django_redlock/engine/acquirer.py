"""
Take the locks of one alias: the steps of :mod:`django_redlock.core.acquisition`, carried out (internal).

The caller may be interrupted between any two bytecodes. Whatever the caller was granted by then is released, over new
connections if necessary.
"""

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from ..core.acquisition import Acquisition, GaveUp, Pause, Step
from ..core.attempt import Granted, HighestToken
from ..core.hold import Hold
from ..core.names import HolderKind, Owner, check_names, named
from ..core.protocol import Release
from ..core.rules import MIN_TTL, Rules, Wanted, seconds
from ..nodes.threads import exiting
from .lease import LASTING, AsyncLease, Lease, LeaseHold, Manager, error_of, explain_waiting
from .notifications import AsyncNotifications, Notifications
from .process import HOST, process


def fresh_secret() -> str:
    """Return 128 random bits as 32 hexadecimal digits."""
    return os.urandom(16).hex()


def nothing() -> None:
    """Do nothing before a pause."""


class Acquirer:
    """
    Takes the locks of one alias, blocking and asyncio.

    Args:
        manager: The manager that extends and releases the leases.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._driver = manager.driver
        self._nodes = manager.nodes
        self._rules = manager.rules
        self._highest = HighestToken()
        self.entered: WeakValueDictionary[tuple[Any, ...], Lease] = WeakValueDictionary()
        """The leases of reentrant locks, by name and thread or task."""

    def left_alone(
        self,
        name: str,
        *,
        ttl: float,
        kind: HolderKind,
        label: str,
        ref: str,
        secret: str,
        adopt: str = "",
        strict: bool = False,
    ) -> Wanted:
        """
        Describe one attempt at a lock with ``detached=True``, for :meth:`run`.

        The arguments are those of :meth:`~.manager.LockManager.claim`.

        A caller that takes the lock and goes away needs neither a :class:`Lock` nor a :class:`Lease`.

        Args:
            strict: Whether the lock must be taken over, from *adopt* or from an earlier hold with the same *secret*; a
                free lock is refused like a taken one.

        Raises:
            ValueError: The name or the ttl cannot work.
        """
        chosen = lease_length(self._rules, ttl, detached=True)
        owner = Owner(HOST, process.pid, kind, label, ref, ttl=chosen)
        return Wanted(check_names(name), chosen, 0, owner, secret, adopt, detached=True, strict=strict)

    def _outcome(self, wanted: Wanted, outcome: Granted | GaveUp) -> Granted | GaveUp:
        if isinstance(outcome, Granted) and wanted.adopt not in ("", outcome.secret):
            self._took_over(wanted, outcome)
        return outcome

    def _took_over(self, wanted: Wanted, granted: Granted) -> None:
        """
        End the hold that was taken over on all nodes.

        A node that missed the round would keep that hold until it ends by itself. The release that is redelivered to
        the node ends the hold and leaves a tombstone, in case the request for the hold is still on its way.
        """
        end = Release(granted.slugs, wanted.adopt, self._rules.guard)
        for round in granted.rounds:
            round.remedy, round.lasting = dict.fromkeys(round.requests, end), LASTING
            self._driver.follow_up(round)

    def acquisition(self, wanted: Wanted, waiter: str = "") -> Acquisition:
        """Return the steps that take a lock; *waiter* is the caller's name in the nodes' queues."""
        if wanted.owner.pid != process.pid:  # the lock was described before the process forked
            owner = wanted.owner._replace(pid=process.pid, process=wanted.owner.process and process.name)
            wanted = wanted._replace(owner=owner)
        return Acquisition(wanted, self._rules, self._highest, fresh_secret, self._manager.runtime.random, waiter)

    def take(
        self, wanted: Wanted, renew: bool, note: Callable[[Lease], object], waiting: Callable[[], object] = nothing
    ) -> Lease:
        """
        Take a lock and return its lease.

        Args:
            wanted: The lock to take.
            renew: Whether to extend it while it is held.
            note: Called with the lease before the caller gets it.
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
                self._manager.ask(
                    Hold(wanted, outcome, self._rules, self._highest).release(self._rules.timeout(wanted.ttl))
                )
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
                self._driver.send(Hold(wanted, outcome, self._rules, self._highest).release(0.0))
            raise

    def run(self, wanted: Wanted, waiting: Callable[[], object] = nothing) -> Granted | GaveUp:
        """Try to take a lock, blocking the calling thread."""
        if exiting():
            raise RuntimeError(f"Lock {named(wanted.names)!r} cannot be taken: the interpreter is about to end.")
        process.notice_fork()
        self._driver.notice_fork()
        notifications = self._driver.notifications
        acquisition = self.acquisition(wanted, notifications.waiters.new_name() if wanted.wait != 0 else "")
        try:
            outcome = self._carry_out(acquisition, notifications, waiting)
            notifications.waiters.leave(acquisition.waiter)
            return self._outcome(wanted, outcome)
        except BaseException:
            try:
                # The connections of the interrupted round were closed, so this makes new ones.
                self._manager.ask(acquisition.undo(self._rules.timeout(wanted.ttl, len(wanted.names))))
            finally:
                notifications.waiters.leave(acquisition.waiter)
            raise

    def _carry_out(
        self, acquisition: Acquisition, notifications: Notifications, waiting: Callable[[], object]
    ) -> Granted | GaveUp:
        notifications.waiters.expect(acquisition.waiter)
        instant = self._manager.runtime.instant
        steps = acquisition.steps(instant())
        try:
            step = next(steps)
            while True:
                if not isinstance(step, Pause):
                    self._manager.ask(step)
                elif acquisition.waiter.name:
                    explain_waiting(self._nodes, acquisition, step)
                    waiting()
                    notifications.wait(acquisition.waiter, step.seconds, step.notified)
                else:
                    self._manager.runtime.sleep(step.seconds)
                step = steps.send(instant())
        except StopIteration as stop:
            outcome: Granted | GaveUp = stop.value
            return outcome

    async def arun(self, wanted: Wanted, waiting: Callable[[], object] = nothing) -> Granted | GaveUp:
        """Try to take a lock in the running event loop."""
        process.notice_fork()
        side = self._driver.loop_side()
        acquisition = self.acquisition(wanted, side.notifications.waiters.new_name() if wanted.wait != 0 else "")
        try:
            outcome = await self._acarry_out(acquisition, side.notifications, waiting)
            side.notifications.waiters.leave(acquisition.waiter)
            return self._outcome(wanted, outcome)
        except BaseException:
            try:
                self._driver.send(acquisition.undo())
            finally:
                side.notifications.waiters.leave(acquisition.waiter)
            raise

    async def _acarry_out(
        self, acquisition: Acquisition, notifications: AsyncNotifications, waiting: Callable[[], object]
    ) -> Granted | GaveUp:
        notifications.waiters.expect(acquisition.waiter)
        instant = self._manager.runtime.instant
        steps = acquisition.steps(instant())
        try:
            step: Step = next(steps)
            while True:
                if not isinstance(step, Pause):
                    await self._manager.aask(step)
                elif acquisition.waiter.name:
                    explain_waiting(self._nodes, acquisition, step)
                    waiting()
                    await notifications.wait(acquisition.waiter, step.seconds, step.notified)
                else:
                    await self._manager.runtime.asleep(step.seconds)
                step = steps.send(instant())
        except StopIteration as stop:
            outcome: Granted | GaveUp = stop.value
            return outcome

    def held(self, wanted: Wanted, outcome: Granted | GaveUp, renew: bool) -> Lease:
        """Return the lease of a won acquisition; raise if the acquisition gave up."""
        lease = Lease(self.hold(wanted, outcome, renew))
        try:
            if not wanted.detached:
                self._manager.runtime.watchdog.watch(lease)
                self._driver.heartbeat.join()
            self._manager.notify("lock_acquired", lease=lease)
            return lease
        except BaseException:  # otherwise the lease would be renewed for as long as the traceback refers to it
            lease.hold.abandon()
            raise

    def aheld(self, wanted: Wanted, outcome: Granted | GaveUp, renew: bool) -> Lease:
        """Do what :meth:`held` does for the running event loop."""
        lease = AsyncLease(self.hold(wanted, outcome, renew))
        try:
            if not wanted.detached:
                self._manager.runtime.loop_watchdog().watch(lease)
                self._driver.loop_side().heartbeat.join()
            self._manager.notify("lock_acquired", lease=lease)
            return lease
        except BaseException:
            lease.hold.abandon()
            raise

    def hold(self, wanted: Wanted, outcome: Granted | GaveUp, renew: bool) -> LeaseHold:
        """
        Return the hold of a won acquisition.

        Raises:
            LockTakenError: Another owner kept the lock.
            QuorumUnavailableError: Too few nodes answered.
        """
        if isinstance(outcome, GaveUp):
            error = error_of(self._nodes, self._rules, wanted, outcome)
            self._manager.notify("lock_taken", name=error.name, error=error)
            raise error
        return LeaseHold(self._manager, wanted, outcome, self._highest, renew)


def lease_length(rules: Rules, ttl: float | None, detached: bool) -> float:
    """
    Return the length of a lease in seconds.

    Raises:
        ValueError: The rules do not allow it.
    """
    if ttl is None:
        return rules.ttl
    return max(MIN_TTL, seconds("ttl", ttl)) if detached else rules.check_ttl(ttl)
