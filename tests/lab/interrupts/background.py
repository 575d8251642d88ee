"""
The code to interrupt: what threads in the background do.

No signal handler runs in these threads, but another thread may raise an exception there. A *turn* runs the work of such
a thread in a thread of the sweep's. After the interruption the thread goes on by itself, as it would, and must finish.
"""

import asyncio
import weakref
from typing import Any

from django_redlock.core.protocol import Release
from django_redlock.engine.driver import Redelivery
from django_redlock.engine.watchdog import NEVER, Watchdog
from django_redlock.nodes.clock import steady

from .scenarios import TTL, Scenario, aside, eventually, fail, mend


class Unfit:
    """
    What a watchdog looks after, and cannot extend.

    Args:
        error: What the attempt raises.
    """

    renewed = True
    slack = 0.0

    def __init__(self, error: type[BaseException]) -> None:
        self.hold = self.keeper = self
        self._error = error
        self._due = 0.0  # once

    def due(self) -> float:
        return self._due

    def valid(self) -> bool:
        return True

    def extend(self, leases: Any) -> int:
        self._due = NEVER
        raise self._error("not to be extended")

    async def aextend(self, leases: Any) -> int:
        await asyncio.sleep(0.03)
        self._due = NEVER
        raise self._error("not to be extended")


class WatchdogTurn:
    """
    A lease that a watchdog of its own extends.

    Args:
        lease: The lease, which is due.
        left: A lease that ends while the watchdog looks after it, and has a callback.
    """

    def __init__(self, lease: Any, left: Any) -> None:
        self._ahead = 0.0  # seconds by which its clock is ahead, so that the lease is due again
        self._lease = lease
        self._left = left
        self._told = False
        self._dog = Watchdog(lambda: steady() + self._ahead)
        self._bell, self._dog._bell = self._dog._bell, self  # type: ignore[assignment]
        self._over = False
        lease.hold._renew_at = 0.0
        left.on_lost(self._tell)
        left.hold.deadline = 0.0
        self._unfit = Unfit(ValueError), Unfit(SystemExit)
        gone = aside(lease.hold.keeper, wait=0).acquire()
        later = aside(lease.hold.keeper, wait=0).acquire()
        self._dog._agenda._leases = {weakref.ref(gone): 0.0, weakref.ref(later): 0.0}
        gone.release()
        later.release()
        self._later = later  # or it would be gone, too
        self._dog._inbox.extend((weakref.ref(each), True) for each in (lease, left, *self._unfit))

    def _tell(self, lease: Any) -> None:
        self._told = True

    def run(self) -> None:
        """Run until the thread would sleep, then until it ends."""
        self._dog._thread._run()

    def ring(self) -> None:
        """Wake nobody; this takes the place of the watchdog's bell."""

    def wait(self, seconds: float) -> bool:
        """Have the thread end instead of sleeping: nothing is left to look after."""
        self._over = True
        self._dog.tends(self._lease.hold.keeper)
        self._dog.forget(self._lease)
        for unfit in self._unfit:
            self._dog._agenda.drop(unfit)
        self._dog.rest()
        return True

    def release(self) -> None:
        """Check that the watchdog still extends the lease, in its own thread; then release the lease."""
        done, self._dog._bell = self._lease.extensions, self._bell
        self._lease.hold._renew_at, self._ahead = 0.0, 5.0
        if self._over:
            self._dog.watch(self._lease)
        else:
            self._dog._thread.start()  # as Background does after an exception
        eventually(lambda: self._lease.extensions > done)
        eventually(lambda: self._told)
        self._dog.forget(self._lease)
        self._dog.rest()
        self._lease.release()


def renew(manager: Any, lock: Any, turn: WatchdogTurn) -> None:
    turn.run()


def renewing(manager: Any, lock: Any) -> WatchdogTurn:
    return WatchdogTurn(lock.acquire(), aside(manager, renew=False).acquire())


class RedeliveryTurn:
    """
    Releases that one node misses while it is down, and that a thread of its own redelivers.

    Args:
        manager: The manager with the nodes.
        lease: The lease that is released.
    """

    def __init__(self, manager: Any, lease: Any) -> None:
        self._manager = manager
        self._lease = lease
        self._clock = steady
        self.redelivery = Redelivery(manager.nodes, self._now)
        self._bell, self.redelivery._bell = self.redelivery._bell, self  # type: ignore[assignment]
        self._ahead = 0.0
        release = Release(lease.hold._slugs, lease.secret, TTL)
        self.redelivery._inbox.append((dict.fromkeys(range(len(manager.nodes)), release), steady() + TTL))
        late = Release(lease.hold._slugs, "0" * 32, TTL)
        self.redelivery._inbox.append(({0: late}, 0.0))

    def _now(self) -> float:
        return steady() + self._ahead

    def run(self) -> None:
        """Run until everything is delivered."""
        self.redelivery._thread._run()
        len(self.redelivery)
        self.redelivery.close()
        self.redelivery._thread._run()

    def ring(self) -> None:
        """Wake nobody; this takes the place of the bell."""

    def wait(self, seconds: float) -> bool:
        """Mend the nodes instead of sleeping."""
        mend(self._manager)
        self._ahead += seconds
        return True

    def release(self) -> None:
        """Check that the thread delivers the rest; then release the lease."""
        mend(self._manager)
        self.redelivery._bell = self._bell
        self.redelivery._thread.start()
        eventually(lambda: not len(self.redelivery))
        self._lease.release()


def redeliver(manager: Any, lock: Any, turn: RedeliveryTurn) -> None:
    fail(manager, "down", 1)
    turn.run()


def redeliver_to_silent(manager: Any, lock: Any, turn: RedeliveryTurn) -> None:
    fail(manager, "silent", 1)
    turn.run()


def redeliver_to_unfit(manager: Any, lock: Any, turn: RedeliveryTurn) -> None:
    fail(manager, "defect", 1)
    turn.run()


def redelivering(manager: Any, lock: Any) -> RedeliveryTurn:
    return RedeliveryTurn(manager, lock.acquire())


BACKGROUND = [
    Scenario("renew", renew, renewing),
    Scenario("redeliver", redeliver, redelivering),
    Scenario("redeliver to a silent node", redeliver_to_silent, redelivering),
    Scenario("redeliver to a node with a defect", redeliver_to_unfit, redelivering),
]
