"""The installed package is complete, and it is the one under test."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, metadata, packages_distributions
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import call_command

import django_redlock

CHECKOUT = Path(__file__).parents[2]
PACKAGE = Path(django_redlock.__file__).parent

wheel_only = pytest.mark.skipif("TOX_ENV_NAME" not in os.environ, reason="tox installs the wheel: run `tox`")


def source_files(package: Path) -> set[str]:
    found = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


@wheel_only
def test_tests_run_the_installed_wheel():
    """Under tox, the package comes from site-packages, not from the folder beside the tests."""
    assert PACKAGE.parent.name == "site-packages"


@wheel_only
def test_wheel_holds_the_package_and_nothing_else():
    """The installed names conflict with no other package: neither redlock, which two others claim, nor tests."""
    names = {path.parts[0] for path in distribution("django-redlock").files or ()}

    assert {name for name in names if not name.endswith(".dist-info")} == {"django_redlock"}
    assert packages_distributions()["django_redlock"] == ["django-redlock"]


def test_every_name_that_is_shared_with_other_packages_is_ours():
    """Commands, templates and static files of all apps share one space, so ours begin with our own name."""
    commands = {path.stem for path in (PACKAGE / "management/commands").glob("*.py")} - {"__init__"}
    folders = {path.relative_to(PACKAGE) for where in ("templates", "static") for path in (PACKAGE / where).glob("*")}

    assert all(command.startswith("redlock_") for command in commands)
    assert {folder.name for folder in folders} <= {"django_redlock", "admin"}


def test_package_is_complete():
    """Every file of the folder is installed: scripts, templates, static files, translations, types."""
    assert source_files(CHECKOUT / "django_redlock") <= source_files(PACKAGE)
    assert "py.typed" in source_files(PACKAGE)


@wheel_only
def test_readme_and_urls_have_the_address_of_the_repository():
    """A package index shows the README outside the repository, where a path in it leads nowhere."""
    about, settings = metadata("django-redlock"), tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    address = settings["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    links = re.findall(r"\]\(([^)]+)\)", about["Description"])

    assert len(links) > 10
    assert [link for link in links if not link.startswith(f"{address}/")] == []
    urls = dict(url.split(", ") for url in about.get_all("Project-URL"))
    assert list(urls) == ["Homepage", "Documentation", "Changelog", "Issues", "Source"]
    assert all(url.startswith(address) for url in urls.values())
    pictures = re.findall(r'src(?:set)?="([^"]+)"', about["Description"])
    files = f"{address}/raw/v{django_redlock.__version__}/docs/images"
    assert pictures == [f"{files}/held-locks-dark.webp", f"{files}/held-locks-light.webp"]


EXTRAS = {
    "celery": ("celery", "celery"),
    "contrib.debug_toolbar": ("debug_toolbar", "debug-toolbar"),
    "contrib.health": ("health_check", "health-check"),
    "contrib.opentelemetry": ("opentelemetry", "otel"),
    "contrib.prometheus": ("prometheus_client", "prometheus"),
    "contrib.rest_framework": ("rest_framework", "rest-framework"),
}
IMPORTING = """
import sys
from importlib import import_module
for module, package in zip(sys.argv[1::2], sys.argv[2::2]):
    sys.modules[package] = None
    try:
        import_module(f"django_redlock.{module}")
    except ModuleNotFoundError as error:
        print(error)
"""


@pytest.mark.server
def test_module_without_its_extra_says_what_to_install():
    """The error is still that of a missing package, for those who try the import."""
    arguments = [part for module, (package, _) in EXTRAS.items() for part in (module, package)]

    child = subprocess.run([sys.executable, "-c", IMPORTING, *arguments], capture_output=True, text=True, check=True)

    remedies = [line.rpartition("; ")[2] for line in child.stdout.splitlines()]
    assert remedies == [f'pip install "django-redlock[{extra}]"' for _, extra in EXTRAS.values()]


@pytest.mark.django_db
def test_no_migration_is_missing():
    """``makemigrations --check`` finds nothing to do in any app of the package."""
    out = StringIO()

    call_command("makemigrations", "redlock", "redlock_history", check=True, dry_run=True, skip_checks=True, stdout=out)

    assert "No changes detected" in out.getvalue()
