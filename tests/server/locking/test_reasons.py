"""The reason of a loss states what the nodes reported, and nothing that nobody knows."""

from collections.abc import Callable

import pytest

from django_redlock import LockLostError
from django_redlock.engine.lease import Lease
from django_redlock.engine.manager import LockManager
from django_redlock.testing import Servers
from tests.managers import Flavour, on_each, real_manager

SLUG = "{a}"


async def later_holder(nodes: Servers, flavour: Flavour, manager: LockManager, lease: Lease) -> None:
    manager.release("a", lease.secret)
    await flavour.acquire(manager.lock("a", renew=False))


async def later_attempt_that_failed(nodes: Servers, flavour: Flavour, manager: LockManager, lease: Lease) -> None:
    """The nodes lose the keys and accept the token of an attempt whose quorum then comes too late."""
    on_each(nodes[:3], "DEL", f"t:{SLUG}:h")
    on_each(nodes[:3], "SET", f"t:{SLUG}:f", str(lease.fencing_token + 1))


async def earlier_data(nodes: Servers, flavour: Flavour, manager: LockManager, lease: Lease) -> None:
    """The nodes are restored from a time when another owner had the lock; that hold has long ended."""
    on_each(nodes[:3], "SET", f"t:{SLUG}:h", "f" * 32 + '{"host":"h"}')
    on_each(nodes[:3], "SET", f"t:{SLUG}:f", str(lease.fencing_token - 1))


async def removed_by_token(nodes: Servers, flavour: Flavour, manager: LockManager, lease: Lease) -> None:
    """
    Another process that knows the token releases the lock, and requests in flight that would restore it are refused.
    """
    on_each(nodes[:3], "DEL", f"t:{SLUG}:h")
    on_each(nodes[:3], "SET", f"t:x:{lease.secret}", "1")


@pytest.mark.parametrize(
    ("happen", "reason"),
    [
        (later_holder, "superseded"),
        (later_attempt_that_failed, "superseded"),
        (earlier_data, "forgotten"),
        (removed_by_token, "forgotten"),
    ],
)
async def test_refused_extension_has_the_reason_that_the_nodes_gave(
    nodes: Servers, flavour: Flavour, happen: Callable[..., object], reason: str
):
    """A later token means that another caller came; without one, the nodes only do not know the holder."""
    manager = real_manager(nodes.urls[:3])
    lease = await flavour.acquire(manager.lock("a", renew=False))
    await happen(nodes, flavour, manager, lease)

    assert not await flavour.extend(lease)

    assert lease.reason == reason


async def test_block_whose_lock_was_removed_is_not_superseded(nodes: Servers, flavour: Flavour):
    """Nobody else had the lock; the nodes no longer had it at the release."""
    manager = real_manager(nodes.urls[:3])
    with pytest.raises(LockLostError, match="no longer know this holder") as caught:
        async with flavour.entered(manager.lock("a", renew=False)):
            on_each(nodes[:3], "DEL", f"t:{SLUG}:h")

    assert caught.value.reason == "forgotten"


async def test_block_whose_lock_somebody_else_has_is_superseded(nodes: Servers, flavour: Flavour):
    """The nodes name another holder at the release."""
    manager = real_manager(nodes.urls[:3])
    with pytest.raises(LockLostError, match="another caller") as caught:
        async with flavour.entered(manager.lock("a", renew=False)):
            on_each(nodes[:3], "SET", f"t:{SLUG}:h", "f" * 32 + '{"host":"h"}')

    assert caught.value.reason == "superseded"
