"""The supported topologies, one card each."""

from .canvas import Canvas

Place = tuple[float, float, str, str]  # where, in which colour, with which text

THREE: list[Place] = [(0, -30, "main", "R"), (-34, 28, "main", "R"), (34, 28, "main", "R")]
FIVE: list[Place] = [
    *((0, -48, "main", "R"), (-48, -8, "main", "R"), (48, -8, "main", "R")),
    *((-30, 46, "main", "R"), (30, 46, "main", "R")),
]
SENTINEL: list[Place] = [(0, -28, "main", "R"), (-34, 40, "wait", "replica"), (34, 40, "wait", "replica")]
MIXED: list[Place] = [(-34, -26, "main", "R"), (34, -26, "main", "R"), (0, 32, "good", "DB")]
CARDS = [
    ("one Redis", [(0, 0, "main", "R")], "0 may fail\na restart loses\nthe locks"),
    ("one with Sentinel", SENTINEL, "fails over by itself\na failover can\nlose a lock"),
    ("three Redis", THREE, "1 may fail\na restarted node\nwaits before it votes"),
    ("two Redis, database", MIXED, "1 may fail\nthe database\nforgets nothing"),
    ("five Redis", FIVE, "2 may fail\na restarted node\nwaits before it votes"),
]


def draw(canvas: Canvas) -> None:
    """Draw the cards side by side."""
    width = 176
    for number, (title, places, below) in enumerate(CARDS):
        left = 16 + number * (width + 12)
        middle = left + width / 2
        canvas.box(left, 20, width, 360)
        canvas.text(middle, 52, title, anchor="middle", weight=600)
        for x, y, colour, _ in places:
            if colour == "wait":
                canvas.line([(middle, 150), (middle + x, 160 + y)], "line", dashed=True)
        for x, y, colour, words in places:
            canvas.circle(middle + x, 160 + y, 26 if colour == "wait" else 22, colour, words)
        canvas.line([(left + 16, 268), (left + width - 16, 268)])
        canvas.text(middle, 298, below, anchor="middle", size=13)
