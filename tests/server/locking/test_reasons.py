"""The reason of a loss states what the nodes reported, and nothing that nobody knows."""

from collections.abc import Callable

import pytest

from django_redlock import Lease
from django_redlock.testing import Servers
from tests.managers import Flavour, on_each, real_manager

SLUG = "{a}"


def later_attempt_that_failed(nodes: Servers, lease: Lease) -> None:
    """The nodes lose the keys and accept the token of an attempt whose quorum then comes too late."""
    on_each(nodes[:3], "DEL", f"t:{SLUG}:h")
    on_each(nodes[:3], "SET", f"t:{SLUG}:f", str(lease.fencing_token + 1))


def earlier_data(nodes: Servers, lease: Lease) -> None:
    """The nodes are restored from a time when another owner had the lock; that hold has long ended."""
    on_each(nodes[:3], "SET", f"t:{SLUG}:h", "f" * 32 + '{"host":"h"}')
    on_each(nodes[:3], "SET", f"t:{SLUG}:f", str(lease.fencing_token - 1))


def removed_by_token(nodes: Servers, lease: Lease) -> None:
    """
    Another process that knows the token releases the lock, and requests in flight that would restore it are refused.
    """
    on_each(nodes[:3], "DEL", f"t:{SLUG}:h")
    on_each(nodes[:3], "SET", f"t:x:{lease.secret}", "1")


@pytest.mark.parametrize(
    ("happen", "reason"),
    [(later_attempt_that_failed, "superseded"), (earlier_data, "forgotten"), (removed_by_token, "forgotten")],
)
async def test_refused_extension_has_the_reason_that_the_nodes_gave(
    nodes: Servers, flavour: Flavour, happen: Callable[..., object], reason: str
):
    """A later token means that another caller came; without one, the nodes only do not know the holder."""
    manager = real_manager(nodes.urls[:3])
    lease = await flavour.acquire(manager.lock("a", renew=False))
    happen(nodes, lease)

    assert not await flavour.extend(lease)

    assert lease.reason == reason
