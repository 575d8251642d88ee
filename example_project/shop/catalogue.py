"""The supplier's catalogue: the articles, their prices, and how many pieces come with every delivery."""

import csv
import time
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

FILE = Path(__file__).with_name("catalogue.csv")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the catalogue."""

    sku: str
    name: str
    price: Decimal
    delivered: int


def read_catalogue() -> list[Row]:
    """Return the catalogue."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return [
            Row(line["sku"], line["name"], Decimal(line["price"]), int(line["delivered"]))
            for line in csv.DictReader(file)
        ]


def fetch_catalogue(seconds: float) -> Iterator[Row]:
    """Yield the catalogue as a slow supplier would send it: within *seconds*."""
    rows = read_catalogue()
    for row in rows:
        time.sleep(seconds / len(rows))
        yield row
