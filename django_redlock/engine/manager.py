"""
The locks of one alias, blocking and asyncio: the decisions of :mod:`django_redlock.core`, carried out (internal).

The public methods of a :class:`LockManager` are ``lock``, ``release``, ``extend``, ``aextend``, ``close`` and
``aclose``.
"""

import atexit
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack
from weakref import WeakSet

from ..core.admission import Admission
from ..core.hold import BATCH, batches, release_outcome, renewal
from ..core.names import HolderKind, Owner, check_names, slug
from ..core.protocol import ANSWERS, Outcome, Release, Reply
from ..core.round import Round, SurveyOptions, cleanup, survey_round
from ..core.rules import UNSET, ReleaseMode, Rules, Wanted
from ..nodes import Node
from .driver import Driver
from .lease import LASTING, Lease, note_extension
from .lock import Description, Lock
from .options import LockOptions, complete, explained
from .process import HOST, process
from .watchdog import Confirmations, Dog, ProcessHeartbeat, this_process

Notify = Callable[..., None]

AT_END: Mapping[HolderKind, ReleaseMode] = {"task": "send", "view": "send"}
"""The release mode at the end of a hold of each kind, unless the lock or the settings choose; other kinds wait."""

REAL = Runtime()

log = logging.getLogger("django_redlock")


def silent(event: str, **about: Any) -> None:
    """Send no signal."""


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
        self.retired = False  # whether the settings have changed since
        self.nodes = tuple(nodes)
        self.rules = rules
        self.notify = notify
        self.runtime = runtime
        self.surroundings = Surroundings()
        admission = Admission(rules, tuple(node.name for node in self.nodes), runtime.clock, runtime.wall)
        self.driver = Driver(alias, self.nodes, rules, admission, runtime, self._report, self._new_heartbeat)
        self.acquirer = Acquirer(self)
        self.confirmations = Confirmations(self)
        _managers.add(self)

    def __repr__(self) -> str:
        return f"<LockManager {self.alias!r}: {', '.join(node.name for node in self.nodes)}>"

    @explained
    def lock(self, name: str | Iterable[str], **options: Unpack[LockOptions]) -> Lock:
        """
        Describe a lock, without a network call.

        Args:
            name: What to lock, or several names to lock all or none of.
            **options: Those of :func:`django_redlock.lock`, which describes each.

        Raises:
            TypeError: A name is not a string.
            ValueError: A name, ttl or wait cannot work; the message says what to write.
        """
        return self.claim(name, **options)

    def claim(
        self,
        name: str | Iterable[str],
        *,
        kind: HolderKind = "manual",
        ref: str = "",
        secret: str = "",
        adopt: str = "",
        detached: bool = False,
        **options: Unpack[LockOptions],
    ) -> Lock:
        """
        Describe a lock for the parts of this package that hold it on behalf of a task, a view or a command (internal).

        Args:
            name: What to lock, or several names to lock all or none of.
            kind: ``manual``, ``task``, ``view``, ``model`` or ``command``, for people. It decides the release mode if
                neither the lock nor the settings choose one: the end of a task's run or of a view may then send the
                release without waiting.
            ref: What identifies the work to programs, such as a task's id.
            secret: The secret to hold the lock with instead of a fresh one: 32 hexadecimal digits, unique to one
                holder. For one ttl after an attempt that failed, nodes that did not answer it refuse the same secret.
            adopt: The secret of a holder to take the lock over from, if that holder still has it.
            detached: Whether the lock is neither renewed nor watched: it may last longer than ``max_ttl``, and its loss
                is not reported. This is for a lock that another process takes over with ``adopt``, and whose loss does
                no harm.
            **options: Those of :meth:`lock`.
        """
        names = check_names(name)
        chosen = complete(names, options)
        ttl = lease_length(self.rules, chosen["ttl"], detached)
        renew = self.rules.renew if chosen["renew"] is None else chosen["renew"]
        # A lock that is not renewed depends on no process: any process with its secret may use it until it ends.
        renewed_by = process.name if renew and not detached else ""
        owner = Owner(HOST, process.pid, kind, chosen["label"], ref, ttl=ttl, process=renewed_by)
        wait = chosen["wait"]
        wanted = Wanted(
            names,
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
            sends=(chosen["release"] or self.rules.release or AT_END.get(kind, "wait")) == "send",
        )
        described = Description(self, wanted, renew, once=wait is UNSET)
        return Lock(names, lambda: described, chosen)

    def release(self, name: str | Iterable[str], secret: str, tombstone: float = 0.0) -> Outcome:
        """
        Release a lock by its secret, in any process; return what :meth:`Lease.release` returns.

        Only the holder with this secret loses the lock. That holder must be dead or must not renew: the next renewal of
        a living holder restores the lock. If a node misses the release, the release is redelivered in the background
        for a day, because a lock that is not renewed may last for long.

        Args:
            name: The lock's name, or several names.
            secret: The holder's secret.
            tombstone: Seconds for which the nodes refuse late requests with this secret.
        """
        process.notice_fork()
        slugs = tuple(slug(name) for name in check_names(name))
        timeout = self.rules.timeout(self.rules.ttl)
        release = Release(slugs, secret, tombstone)
        round = cleanup(release, range(self.rules.nodes), (), 0.0, timeout, self.rules.needed)
        round.lasting = LASTING
        self.ask(round)
        return release_outcome(round, self.rules)

    def survey(self, **options: Unpack[SurveyOptions]) -> dict[int, Reply]:
        """
        Ask the nodes for the locks with given names, or for one page of their indexes.

        Args:
            **options: Those of :class:`~django_redlock.core.round.SurveyOptions`.

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
        self.confirmations.send(float("inf"))
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

    def extend(self, leases: Sequence[Lease], ttl: float | None = None) -> int:
        """
        Extend leases, at most a hundred in one round; return how many are longer now.

        Args:
            leases: Leases of this manager.
            ttl: Length of the leases from now on, in seconds; None keeps the length of each.
        """
        longer = 0
        for round, chosen in self._renewals(leases, ttl):
            start = self.runtime.clock()
            self.ask(round)
            longer += note_extension(round, chosen, start)
        return longer

    async def aextend(self, leases: Sequence[Lease], ttl: float | None = None) -> int:
        """Do what :meth:`extend` does without blocking."""
        longer = 0
        for round, chosen in self._renewals(leases, ttl):
            start = self.runtime.clock()
            await self.aask(round)
            longer += note_extension(round, chosen, start)
        return longer

    def _renewals(self, leases: Sequence[Lease], ttl: float | None) -> Iterator[tuple[Round, list[Lease]]]:
        """Yield each round and the leases that it extends; a lease that ended meanwhile is in none."""
        for first in range(0, len(leases), BATCH):
            now = self.runtime.clock()
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
                    return  # the nodes are silent: do not delay the leases of other aliases

    def _report(self, event: str, **about: Any) -> None:
        self.notify(event, **about)  # looked up now, because it may have been replaced

    def _new_heartbeat(self, dog: Dog, dropped: Iterable[float]) -> ProcessHeartbeat:
        owner = this_process(HOST, process.name, since=self.runtime.wall())
        return ProcessHeartbeat(self, owner, dog, self.runtime.clock, dropped)


_managers: WeakSet[LockManager] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Close the idle connections of this process; locks still held are left to end by themselves."""
    process.ends = True
    for manager in list(_managers):
        manager.close()
