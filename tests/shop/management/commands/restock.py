"""A command under a lock, for one supplier after the other; reads a line before it continues."""

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from django_redlock import locked_command


@locked_command("restock:{supplier}")
class Command(BaseCommand):
    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("supplier", type=int)

    def handle(self, *, supplier: int, **options: Any) -> None:
        self.stdout.write(f"restocking {supplier}")
        self.stdout.flush()
        sys.stdin.readline()
