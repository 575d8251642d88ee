"""The in-memory nodes of tests, and how every test finds them empty (internal)."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..nodes.memory import MemoryNode


def reset_locks() -> None:
    """
    End all locks on in-memory nodes, and recreate the managers of ``REDLOCK``.

    The call does nothing in a process that has not used such a node. Locks on servers and in databases stay.
    """
    memory = sys.modules.get("django_redlock.nodes.memory")  # not imported for a project that does not use it
    if memory is not None and (nodes := memory.forget_nodes()):
        from ..core.protocol import EndReason
        from ..engine.reentrancy import forget_taken, taken_here
        from ..engine.watchdog import NEVER, unreleased
        from ..handler import locks  # only here, because it needs Django

        for lease in (*taken_here(), *(drop() for drop in list(unreleased.values()))):
            if lease is not None and nodes.issuperset(lease.hold.keeper.nodes):
                lease.hold.report_at = NEVER  # its holder learns of it; the next test has nothing to do with it
                lease.hold.end(EndReason.FORGOTTEN, lease.hold.clock())
        locks.reset()
        forget_taken()


def memory_nodes(using: str = "default") -> "list[MemoryNode]":
    """
    Return the in-memory nodes of an alias, which fail on command.

    Args:
        using: The alias in ``REDLOCK``.

    Raises:
        ValueError: The alias has none.
        InvalidRedlockError: The alias cannot be used.
    """
    from ..handler import locks  # only here, because it needs Django
    from ..nodes.memory import MemoryNode

    found = [node for node in locks[using].nodes if isinstance(node, MemoryNode)]
    if not found:
        raise ValueError(f"REDLOCK[{using!r}] has no in-memory nodes; in tests, write NODES = ['memory://a', ...].")
    return found


class ResetLocksMixin:
    """
    Make every test of a ``TestCase`` begin and end without locks on in-memory nodes.

    List the mixin before the class: ``class CheckoutTests(ResetLocksMixin, TestCase)``. The pytest plugin does the same
    for all tests.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        before = cls.__mro__[: cls.__mro__.index(ResetLocksMixin)]
        cases = [each.__name__ for each in before if hasattr(each, "run") and not issubclass(each, ResetLocksMixin)]
        if cases:  # their run() comes first
            right = f"class {cls.__name__}(ResetLocksMixin, {cases[0]})"
            raise TypeError(f"ResetLocksMixin has no effect behind {cases[0]}; write {right}.")

    def run(self, result: Any = None) -> Any:
        """Run the test between two resets; not in ``setUp()``, which many classes override without ``super()``."""
        reset_locks()
        try:
            return super().run(result)  # type: ignore[misc]
        finally:
            reset_locks()

    def debug(self) -> None:
        """Do the same without a result, as for ``--pdb``."""
        reset_locks()
        try:
            super().debug()  # type: ignore[misc]
        finally:
            reset_locks()
