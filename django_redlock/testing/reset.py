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
        from ..engine.reentrancy import forget_taken
        from ..handler import locks  # only here, because it needs Django

        locks.reset()
        forget_taken()


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
