"""Empty the in-memory nodes for every test (internal)."""

import sys
from typing import Any


def reset_locks() -> None:
    """
    End all locks on in-memory nodes, and recreate the managers of ``REDLOCK``.

    The call does nothing in a process that has not used such a node. Locks on servers and in databases stay.
    """
    memory = sys.modules.get("django_redlock.nodes.memory")  # not imported for a project that does not use it
    if memory is not None and memory.forget_nodes():
        from ..engine.holdings import forget_holdings
        from ..handler import locks  # only here, because it needs Django

        locks.reset()
        forget_holdings()


class ResetLocksMixin:
    """
    Make every test of a ``TestCase`` begin and end without locks on in-memory nodes.

    List the mixin before the class: ``class CheckoutTests(ResetLocksMixin, TestCase)``. The pytest plugin does the same
    for all tests.
    """

    def setUp(self: Any) -> None:
        """Reset the locks, now and at the end of the test."""
        reset_locks()
        self.addCleanup(reset_locks)
        super().setUp()  # type: ignore[misc]
