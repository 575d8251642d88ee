import os
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.hashers import make_password
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError

CUSTOMERS = ("anna", "ben", "chen")


class Command(BaseCommand):
    help = "Make the tables, the login 'admin' and three customers; their password comes from SHOP_PASSWORD."

    def handle(self, **options: Any) -> None:
        if not (password := os.environ.get("SHOP_PASSWORD")):
            raise CommandError("Set SHOP_PASSWORD to the password that the logins shall have.")
        call_command("migrate", verbosity=0)
        self.make_logins(make_password(password))

    def make_logins(self, password: str) -> None:
        users = get_user_model().objects
        users.update_or_create(
            username="admin", defaults={"password": password, "is_staff": True, "is_superuser": True}
        )
        for name in CUSTOMERS:
            users.update_or_create(username=name, defaults={"password": password})
