"""What the pictures show."""

from collections.abc import Callable
from pathlib import Path

from .canvas import THEMES, Canvas
from .dashboard import draw as draw_dashboard
from .topologies import draw as draw_topologies

IMAGES = Path(__file__).parents[3] / "docs" / "images"
Draw = Callable[[Canvas], None]


def files() -> dict[str, str]:
    """Return the text of every file, by name."""
    found = {}
    for name, (width, height, title, draw) in PICTURES.items():
        for theme, colours in THEMES.items():
            canvas = Canvas(width, height, title, colours)
            draw(canvas)
            found[f"{name}-{theme}.svg"] = canvas.svg()
    return found


def five_nodes(canvas: Canvas) -> None:
    """One attempt over five nodes; time runs to the right."""
    start, end, top, step = 190, 880, 70, 62
    lanes = [top + number * step for number in range(6)]
    sent, decided = 230, 386
    names = ["client", "node 1", "node 2", "node 3", "node 4 (down)", "node 5 (slow)"]
    for y, name in zip(lanes, names, strict=True):
        canvas.text(start - 20, y + 5, name, anchor="end", weight=600 if name == "client" else 400)
        canvas.line([(start, y), (end, y)])
    until = 800
    lease = "the client's lease: ttl less drift, from before the first byte"
    canvas.label(sent, lanes[0] - 15, until - 40 - sent, 30, lease, "main")
    for number, (there, back) in enumerate([(252, 300), (268, 334), (290, decided)], 1):
        y = lanes[number]
        canvas.label(there, y - 12, until + there - 252 - there + 22, 24, "key with a ttl", "good")
        canvas.arrow([(sent, lanes[0] + 15), (there, y - 12)], "main")
        canvas.arrow([(there + 8, y - 12), (back, lanes[0] + 15)], "good")
    canvas.arrow([(sent, lanes[0] + 15), (286, lanes[4] - 8)], "line", dashed=True)
    canvas.cross(290, lanes[4])
    canvas.text(412, lanes[4] - 8, "no reply: one vote less, and no waiting", "bad", size=13)
    canvas.arrow([(sent, lanes[0] + 15), (430, lanes[5] - 12)], "line", dashed=True)
    canvas.label(430, lanes[5] - 12, until - 400, 24, "", "wait")
    canvas.text(440, lanes[5] + 5, "a late grant keeps others out as well")
    canvas.line([(decided, 34), (decided, lanes[0] - 15)], "good")
    canvas.text(decided, 26, "three of five have granted it: the lock is held", "good", "middle", 13, 600)
    canvas.line([(until - 40, lanes[0] + 15), (until - 40, lanes[5] + 34)], "main", dashed=True)
    canvas.text(until - 40, lanes[5] + 50, "the lease ends before any of these keys does", "main", "middle", 13)
    canvas.arrow([(start, lanes[5] + 34), (start + 90, lanes[5] + 34)], "soft")
    canvas.text(start + 98, lanes[5] + 38, "time", "soft", size=13)


def fence(canvas: Canvas) -> None:
    """Kleppmann's figure, with the fence in the database."""
    lanes = {"client 1": 80, "lock nodes": 165, "client 2": 250, "database": 345}
    for name, y in lanes.items():
        canvas.text(110, y + 5, name, anchor="end", weight=600)
        canvas.line([(125, y), (880, y)])
    one, nodes, two, database = lanes.values()
    canvas.arrow([(150, one), (170, nodes)], "main")
    canvas.arrow([(178, nodes), (200, one)], "good")
    canvas.text(208, one + 44, "token 33", "good", size=13)
    canvas.label(225, one - 20, 385, 40, "paused: swapping, a suspended machine, ...", "wait")
    canvas.label(178, nodes - 11, 170, 22, "lease of client 1", "main")
    canvas.cross(348, nodes)
    canvas.text(348, nodes + 34, "it ends", "bad", "middle", 13)
    canvas.arrow([(395, two), (410, nodes)], "main")
    canvas.arrow([(420, nodes), (440, two)], "good")
    canvas.text(450, nodes + 44, "token 34", "good", size=13)
    canvas.label(420, nodes - 11, 230, 22, "lease of client 2", "main")
    canvas.arrow([(470, two), (490, database - 14)], "main")
    canvas.text(492, two + 40, "claims 34, reads,\nwrites, commits", size=13)
    canvas.label(490, database - 14, 130, 28, "fence: 34", "good")
    canvas.label(625, one - 14, 84, 28, "continues", "main")
    canvas.arrow([(668, one + 14), (700, database - 14)], "main")
    canvas.text(708, two + 40, "claims 33", size=13)
    canvas.label(672, database - 14, 190, 28, "33 < 34: StaleTokenError", "bad")
    canvas.text(767, database + 36, "client 1 cannot commit", "bad", "middle", 13, 600)
    canvas.arrow([(125, database + 50), (215, database + 50)], "soft")
    canvas.text(223, database + 54, "time", "soft", size=13)


def singleton(canvas: Canvas) -> None:
    """The life of one call of a singleton task."""
    canvas.label(30, 120, 150, 60, "delay(7)", "main")
    canvas.label(270, 105, 180, 90, "queued\nthe slot is taken\nfor up to queue_ttl", "wait")
    canvas.label(540, 105, 180, 90, "running\nthe slot is renewed\nwhile the worker lives", "good")
    canvas.label(790, 120, 120, 60, "done\nslot free", "main")
    canvas.arrow([(180, 150), (270, 150)])
    canvas.text(225, 140, "sent", "soft", "middle", 13)
    canvas.arrow([(450, 150), (540, 150)])
    canvas.text(495, 140, "received", "soft", "middle", 13)
    canvas.arrow([(720, 150), (790, 150)])
    canvas.text(755, 140, "returns", "soft", "middle", 13)
    canvas.label(385, 20, 220, 44, "a second delay(7): joins it,\nand nothing is sent", "main")
    canvas.arrow([(430, 64), (390, 105)], "main", dashed=True)
    canvas.arrow([(560, 64), (600, 105)], "main", dashed=True)
    canvas.label(515, 260, 230, 66, "killed\nnobody renews the slot;\nfree after lease, 30 s at most", "bad")
    canvas.arrow([(630, 195), (630, 260)], "bad")
    canvas.text(640, 232, "SIGKILL, out of memory", "bad", size=13)
    canvas.arrow([(515, 293), (360, 293), (360, 195)], "wait")
    canvas.text(372, 266, "redelivered\n(late acks)", "wait", size=13)
    canvas.arrow([(745, 293), (790, 293)])
    canvas.label(790, 260, 120, 66, "not redelivered:\nthe next call\nruns", "main")


PICTURES: dict[str, tuple[int, int, str, Draw]] = {
    "lock-over-five-nodes": (
        920,
        450,
        "A client takes a lock on three of five nodes; one is down, one is slow",
        five_nodes,
    ),
    "fence": (900, 410, "A paused holder is refused by the database, because a later token was claimed", fence),
    "singleton-call": (930, 350, "The life of a singleton call: queued, running, done or killed", singleton),
    "topologies": (960, 400, "Five topologies with what each survives", draw_topologies),
    "dashboard": (960, 560, "The Grafana dashboard after an hour in which one node was down", draw_dashboard),
}
