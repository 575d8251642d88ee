"""Settings of the workers that ``workers/`` starts: the nodes are those that the tests tell them."""

import os
from typing import Any

from tests.settings import *  # noqa: F403


def redlock(nodes: str) -> dict[str, Any]:
    """Return the setting for nodes that have just started."""
    return {"default": {"NODES": nodes, "OPTIONS": {"restart_guard": False}}}


REDLOCK = redlock(os.environ.get("TEST_NODES", "memory://a,memory://b,memory://c"))
