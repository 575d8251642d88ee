"""
A check for django-health-check 4 and later that reports whether locks can be taken.
"""

import dataclasses
import datetime

from ..conf import InvalidRedlockError
from ..exceptions import missing_extra
from ..inventory import aheld_locks

try:
    from health_check.base import HealthCheck
    from health_check.exceptions import ServiceUnavailable, ServiceWarning
except ModuleNotFoundError as error:
    raise missing_extra(error, "health-check") from None


@dataclasses.dataclass
class Redlock(HealthCheck):  # type: ignore[misc]
    """
    Check that enough nodes of an alias answer and may vote.

    Args:
        alias: The alias in ``REDLOCK``.
        spare: How many more nodes must be able to fail; if fewer can, the check gives a warning.
        timeout: The time after which the check fails.
    """

    alias: str = "default"
    spare: int = 0
    timeout: datetime.timedelta = dataclasses.field(default=datetime.timedelta(seconds=5), repr=False)

    async def run(self) -> None:
        """
        Query the nodes and compare the number that may vote with the quorum.

        Raises:
            ServiceUnavailable: No lock can be taken.
            ServiceWarning: Fewer nodes than *spare* may still fail.
        """
        try:
            snapshot = await aheld_locks(self.alias)
        except InvalidRedlockError as error:
            raise ServiceUnavailable(f"The settings cannot be used ({error.code}).") from None
        if snapshot.spare < 0:
            raise ServiceUnavailable(f"{snapshot.quorum} {snapshot.trouble}")
        if snapshot.spare < self.spare:
            raise ServiceWarning(f"{snapshot.quorum} {snapshot.trouble}")
