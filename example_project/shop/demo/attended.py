"""The demo for people: print what there is to see, and bring back the nodes that they kill."""

import time

from .nodes import Member
from .report import Say
from .stack import Stack

BACK_AFTER = 30.0  # seconds; longer than max_ttl in the settings, so that an empty node has forgotten no lease

WELCOME = """
The shop        {url}
Held locks      {url}admin/redlock/heldlock/
Log in as       admin, password {password} (customers anna, ben and chen have the same one)

{servers}
Files and logs  {folder}

Things to try
{kill}  * Open Held locks, tick the import, choose "Release the selected locks" and confirm.
    The import that lost its lock stops, and the next one may start.
  * Press Buy twice, quickly.
    The second click is answered "409 Conflict" and buys nothing.

Ctrl-C stops everything.
"""
KILL = """\
  * Kill {name}: kill -9 {pid}
    The import goes on; Held locks shows {votes}. The server comes back after {back:.0f} s.
"""


def welcome(stack: Stack) -> str:
    """Return the text about what to see and to try."""
    nodes = stack.nodes
    servers: list[tuple[str, Member]] = [
        *((f"{nodes.call}-{place}", server) for place, server in enumerate(nodes.servers, 1)),
        ("broker", stack.broker),
    ]
    votes = f"{nodes.seen[-1]} of {nodes.votes[0]} votes"
    victim = servers[0] if nodes.losable else None
    return WELCOME.format(
        url=stack.url,
        password=stack.password,
        servers="\n".join(f"{name:15} port {server.port}, pid {server.pid}" for name, server in servers),
        folder=stack.folder,
        kill=KILL.format(name=victim[0], pid=victim[1].pid, votes=votes, back=BACK_AFTER) if victim else "",
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
        for place, node in enumerate(stack.nodes.servers):
            if node.running:
                continue
            if place not in gone:
                gone[place] = time.monotonic()
                say(f"{stack.nodes.call}-{place + 1} is gone: {standing(stack)}")
            elif time.monotonic() > gone[place] + BACK_AFTER:
                node.restart()
                del gone[place]
                lost = "empty, " if stack.nodes.empty else ""
                say(f"{stack.nodes.call}-{place + 1} is back, {lost}with pid {node.pid}: {standing(stack)}")
        time.sleep(0.3)


def standing(stack: Stack) -> str:
    """Return in words how many nodes are left, and what that means."""
    servers = stack.nodes.servers
    alive = sum(server.running for server in servers)
    enough = alive > len(servers) // 2
    return f"{alive} of {len(servers)} are there, {'enough' if enough else 'too few'} for a majority"
