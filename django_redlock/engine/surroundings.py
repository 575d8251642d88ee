"""The event loop and the transactions around a lock (internal)."""

from typing import Any, Protocol

from ..core.rules import Rules


class Released(Protocol):
    """A lease, as far as the end of a transaction is concerned."""

    def release(self, wait: bool = True) -> Any:
        """Give the lock up."""

    @property
    def hold(self) -> Any:
        """The hold, which knows whether its release waits for the nodes."""


class Surroundings:
    """The event loop and the transactions of the calling thread, as a framework knows them: here, none."""

    def blocking(self) -> None:
        """Raise if the calling thread must not block, because it runs an event loop."""

    def entering(self, name: str, rules: Rules) -> None:
        """Warn or raise if a transaction is open, which would end after the lock *name* is released."""

    def keep(self, lease: Released) -> bool:
        """Have *lease* released when the open transactions have ended; returns whether any is open."""
        return False
