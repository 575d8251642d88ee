"""Tables in Markdown, as instruments print them."""

from collections.abc import Iterable, Sequence


def row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def heads(columns: Sequence[str], *, numbers: bool = False) -> str:
    """Return the titles of the columns, and the line below them; *numbers* are on the right of theirs."""
    return f"{row(columns)}\n| --- |" + (" ---: |" if numbers else " --- |") * (len(columns) - 1)
