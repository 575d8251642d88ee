"""The event loop and the transactions around a lock (internal)."""

from typing import Any, Protocol

from ..core.rules import Rules


class Released(Protocol):
    """The part of a lease that is used at the end of a transaction."""

    def release(self, wait: bool = True) -> Any:
        """Release the lock."""

    @property
    def hold(self) -> Any:
        """The hold, which knows whether its release waits for the nodes."""


class Surroundings:
    """The event loop and the transactions of the calling thread, as a framework knows them; this class knows none."""

    def blocking(self) -> None:
        """Raise if the calling thread must not block, because it runs an event loop."""

    def entering(self, name: str, rules: Rules, on_commit: bool = False) -> None:
        """
        Warn or raise if a transaction is open that would end only after the lock *name* is released.

        With *on_commit*, raise if the end of a transaction could not be noticed.
        """

    def keep(self, lease: Released) -> bool:
        """Have *lease* released when the open transactions have ended; return whether any is open."""
        return False
