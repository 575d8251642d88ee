"""The migrations of the package match its models."""

from io import StringIO

import pytest
from django.core.management import call_command


@pytest.mark.django_db
def test_no_migration_is_missing():
    """``makemigrations --check`` finds nothing to do in any app of the package."""
    out = StringIO()

    call_command("makemigrations", "redlock", check=True, dry_run=True, skip_checks=True, stdout=out)

    assert "No changes detected" in out.getvalue()
