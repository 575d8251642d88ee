"""The demo for people: print what there is to see, and bring back the nodes that they kill."""

import time

from .report import Say
from .stack import Stack

BACK_AFTER = 30.0  # seconds; longer than max_ttl in the settings, so that an empty node has forgotten no lease

WELCOME = """
The shop        {url}
Held locks      {url}admin/redlock/heldlock/
Log in as       admin, password {password} (customers anna, ben and chen have the same one)

{servers}
Files and logs  {folder}

Three things to try
  1. Kill a lock node: kill -9 {victim}
     The import goes on; Held locks shows 4 of 5 votes. The node comes back after {back:.0f} seconds.
  2. Open Held locks, tick the import, choose "Release the selected locks" and confirm.
     The import that lost its lock stops, and the next one may start.
  3. Press Buy twice, quickly.
     The second click is answered "409 Conflict" and buys nothing.

Ctrl-C stops everything.
"""


def welcome(stack: Stack) -> str:
    """Return the text about what to see and to try."""
    servers = [(f"lock-{place}", node) for place, node in enumerate(stack.nodes, 1)] + [("broker", stack.broker)]
    return WELCOME.format(
        url=stack.url,
        password=stack.password,
        servers="\n".join(f"{name:15} port {server.port}, pid {server.pid}" for name, server in servers),
        folder=stack.folder,
        victim=stack.nodes[1].pid,
        back=BACK_AFTER,
    )


def run(stack: Stack, say: Say) -> None:
    """
    Wait for Ctrl-C, and bring back killed nodes.

    Raises:
        CommandError: A process of the shop ended.
    """
    gone: dict[int, float] = {}
    while True:
        stack.check()
        for place, node in enumerate(stack.nodes):
            if node.running:
                continue
            if place not in gone:
                gone[place] = time.monotonic()
                say(f"lock-{place + 1} is gone: {standing(stack)}")
            elif time.monotonic() > gone[place] + BACK_AFTER:
                node.restart()
                del gone[place]
                say(f"lock-{place + 1} is back, empty, with pid {node.pid}: {standing(stack)}")
        time.sleep(0.3)


def standing(stack: Stack) -> str:
    """Return in words how many nodes are left, and what that means."""
    alive = sum(node.running for node in stack.nodes)
    enough = alive > len(stack.nodes) // 2
    return f"{alive} of {len(stack.nodes)} are there, {'enough' if enough else 'too few'} for a majority"
