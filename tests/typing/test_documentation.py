"""
What the documentation shows passes mypy in strict mode and pyright.

Each block of Python in the README and in ``docs/`` is a module, or several if comments in it name several files. A name
that a module does not define comes from the last one before it on its page that does. A name that none defines belongs
to the reader's project and has any type, and so has what a package without types has. An annotation that is missing is
no error: the pages leave out those that do not help a reader. What is not a module, such as a part of a setting, is
left out.
"""

import builtins
import dis
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import celery
import pytest

from tests.unit.test_docs_code import PAGES, ROOT, Block, blocks, undefined

pytestmark = pytest.mark.endurance

FILE = re.compile(r"^(?=# \S+\.py$)", re.MULTILINE)

CONFIGURATION = {
    "mypy.ini": """\
[mypy]
strict = True
plugins = mypy_django_plugin.main
disable_error_code = no-untyped-call, no-untyped-def, untyped-decorator, var-annotated
disallow_subclassing_any = False
ignore_missing_imports = True
implicit_reexport = True

[mypy-django_redlock.*,tests.*]
ignore_errors = True

[mypy.plugins.django-stubs]
django_settings_module = tests.settings
""",
    "pyrightconfig.json": """\
{"useLibraryCodeForTypes": false, "reportMissingImports": false, "reportMissingModuleSource": false}
""",
}


def files(page: str) -> Iterator[Block]:
    """Yield the files of a page."""
    for block in blocks(page):
        line = block.line
        for text in filter(None, FILE.split(block.text)):
            yield block._replace(line=line, text=text)
            line += text.count("\n")


def modules(page: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each module of a page; the line of an error is that of the page."""
    makers: dict[str, str] = {}
    for file in files(page):
        try:
            code = file.compiled()
        except SyntaxError:
            continue
        name = re.sub(r"\W", "_", page.removesuffix(".md")) + f"_{file.line}"
        made, missing = names(code)
        head = [f"from {makers[each]} import {each}" if each in makers else f"{each}: Any = ..." for each in missing]
        yield name, "; ".join(["from typing import Any", *head]) + "\n" * file.line + file.text
        makers |= dict.fromkeys(made, name)


def names(code: CodeType) -> tuple[set[str], set[str]]:
    """Return the names that a module defines, and those that it reads and does not define, or not before that."""
    made, missing = set[str](), undefined(code, {})
    for step in dis.get_instructions(code):
        if step.opname == "STORE_NAME":
            made.add(step.argval)
        elif step.opname == "LOAD_NAME" and step.argval not in made and not hasattr(builtins, step.argval):
            missing.add(step.argval)
    return made, {name for name in missing if not name.startswith("__")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the modules of all pages."""
    folder = tmp_path_factory.mktemp("pages")
    for page in PAGES:
        for name, text in modules(page):
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
    for name, text in CONFIGURATION.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def errors(folder: Path, *command: str) -> list[str]:
    """Run a type checker in a folder, and return its errors."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout.splitlines() if done.returncode else []


def test_documentation_passes_mypy_in_strict_mode(folder: Path) -> None:
    assert errors(folder, "mypy", ".") == []


def test_documentation_passes_pyright(folder: Path) -> None:
    assert errors(folder, "pyright", "--pythonpath", sys.executable) == []


WITHOUT_TYPES_OF_CELERY = """\
# pyright: basic, reportUnnecessaryTypeIgnoreComment=true
from typing import Any, assert_type

from django_redlock.celery import SingletonResult, SingletonTask, singleton_task


@singleton_task(bind=True)
def sync(self: SingletonTask[..., Any], shop: int) -> str:
    return str(shop)


assert_type(sync(7), str)
assert_type(sync.delay(7), SingletonResult[str])
assert_type(sync.singleton.is_locked(7), bool)
sync.apply_async((7,), countdown=5)
sync.delay_on_commit(7)
sync.delay("7")  # pyright: ignore[reportArgumentType]
"""


def test_singleton_is_typed_without_celery_types(tmp_path: Path) -> None:
    """Celery itself has no types, and users need not install any for pyright to check the calls of a singleton."""
    venv.create(tmp_path / "venv")
    (site,) = tmp_path.glob("venv/lib/*/site-packages")
    for package in Path(celery.__file__).parents[1].iterdir():
        if not package.name.endswith("-stubs") or package.name == "django-stubs":
            (site / package.name).symlink_to(package)
    (tmp_path / "usage.py").write_text(WITHOUT_TYPES_OF_CELERY, encoding="utf-8")

    assert errors(tmp_path, "pyright", "--pythonpath", str(tmp_path / "venv/bin/python"), "usage.py") == []
