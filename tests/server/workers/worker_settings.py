"""Settings of the workers that ``workers/`` starts: the nodes are those that the tests tell them."""

import os
from typing import Any

from tests.settings import *  # noqa: F403


def redlock(nodes: str) -> dict[str, Any]:
    """
    Return the setting for nodes that have just started.

    On a busy machine they may take longer than usual to answer, and without them a message is sent without a slot. A
    lease of ten minutes outlasts every test.
    """
    return {"default": {"NODES": nodes, "OPTIONS": {"restart_guard": False, "node_timeout": 2.0, "max_ttl": 600}}}


REDLOCK = redlock(os.environ.get("TEST_NODES", "memory://a,memory://b,memory://c"))
