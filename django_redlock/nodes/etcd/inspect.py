"""What an etcd cluster says of itself, for the doctor (internal)."""

import time
from contextlib import suppress

from ..base import LinkError
from .client import Client, EtcdError, link_error, number
from .place import Place

SAMPLES = 5  # round trips; the shortest one counts


def examine(place: Place, timeout: float) -> tuple[float, dict[str, str]]:
    """
    Ask each member; returns the seconds that the shortest round trip took, and facts for the doctor.

    Args:
        place: The cluster.
        timeout: Seconds to wait for each reply.

    Raises:
        LinkError: No member answers.
    """
    facts: dict[str, str] = {}
    trips: list[float] = []
    silent: list[str] = []
    failure: LinkError | None = None
    for position, (host, port) in enumerate(place.members):
        try:
            trips.append(_ask(Client(place, position, timeout), facts))
        except (EtcdError, OSError) as error:
            failure = link_error(error)
            silent.append(f"{host}:{port} ({failure.detail})")
    if failure and not trips:
        raise failure
    return min(trips), facts | ({"silent": ", ".join(silent)} if silent else {})


def _ask(client: Client, facts: dict[str, str]) -> float:
    """Add what a member says to the facts; returns the seconds of the shortest round trip."""
    trips = []
    try:
        client.open()
        for _ in range(SAMPLES):
            began = time.perf_counter()
            status = client.call("/v3/maintenance/status", {})
            trips.append(time.perf_counter() - began)
        version = str(status.get("version", ""))[:20]
        facts["version"] = min(version, facts.get("version", version), key=_parts)
        if quota := number(status, "dbSizeQuota"):  # from version 3.6 on
            used = number(status, "dbSize") / quota
            facts["used"] = f"{max(used, float(facts.get('used', 0))):.3f}"
        with suppress(EtcdError):  # the user may lack the right
            alarms = client.call("/v3/maintenance/alarm", {"action": "GET"}).get("alarms", [])
            if names := {str(alarm.get("alarm")) for alarm in alarms}:
                facts["alarms"] = ", ".join(sorted(names))
        return min(trips)
    finally:
        client.close()


def _parts(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]
