"""
The Python in the documentation runs.

Every block is compiled, and what it imports from this package exists. Those of the README, of the first page, of
*Start* and of *How-to* are executed, page by page, over nodes in memory; names of the reader's project, such as
``send_invoices``, are stand-ins. A block that cannot be executed has the reason in an HTML comment before it.
"""

import ast
import asyncio
import builtins
import dis
import inspect
import re
import shlex
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import django
import pytest
from django.core import checks
from django.core.management import load_command_class
from django.db import connections, models, transaction
from django.db.models import F
from django.test import RequestFactory, TestCase, override_settings
from django.test.utils import isolate_apps
from django.views import View

from django_redlock.testing import reset_locks
from tests.shop import models as shop_models

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
TYPED = {"docs/start/quickstart.md", "docs/start/tutorial.md"}  # tests/server types them, file by file
FOR_USERS = ("README", "docs/index", "docs/start", "docs/howto")
EXECUTED = [page for page in PAGES if page.startswith(FOR_USERS) and page not in TYPED]
LENIENT = "docs/howto/celery"  # whatever these pages do not define is a stand-in
DJANGO = {"docs/howto/tasks.md": (6, 0)}  # the first Django that has what a page is about
TASKS = {
    "default": {"BACKEND": "django.tasks.backends.dummy.DummyBackend"},  # keeps rows, and runs none
    "now": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend"},
}
NEEDS = {"rest_framework": "djangorestframework", "debug_toolbar": "django-debug-toolbar"}
BLOCK = re.compile(
    r"(?:^<!-- *(?P<reason>(?:(?!-->).)+?) *-->\n+)?^```python\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
SETTINGS_ERRORS = {f"redlock.{code}" for code in ("E001", "E003", "E004", "E006", "E007", "E009", "E010")}

# Called when the blocks of their page have run, so that the bodies of functions run as well.
CALLS = {
    "docs/howto/wait-in-a-request.md": ["assert publish(None, 7).status_code == 200"],
    "docs/howto/tasks.md": [
        "sync(7)",
        "assert (first.duplicate, second.duplicate, second.reason, second.id) == (False, True, 'queued', first.id)",
        "assert import_catalogue.using(backend='now').enqueue(7).status == 'SUCCESSFUL'",
    ],
    "docs/howto/migrate.md": ["import_feed('feed')"],
    "docs/howto/rate-limit.md": ["order.reminded = None; assert remind(order); assert not remind(order)"],
    "docs/howto/locks.md": [
        *("nightly()", "run(send_one())"),
        *("run(report(None))", "run(pay(post, pk=7))", "run(refresh_rates())"),
    ],
    "docs/howto/atomic-requests.md": ["pay(post, pk=7)"],
}


class Block(NamedTuple):
    page: str
    line: int
    text: str
    reason: str | None

    def compiled(self) -> CodeType:
        """Return the code, whose lines are those of the page; ``await`` is allowed, as in a shell for asyncio."""
        tree = ast.parse("\n" * self.line + self.text, self.page)
        return compile(tree, self.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        yield Block(page, text[: match.start("text")].count("\n"), match["text"], match["reason"])


def too_new(page: str) -> bool:
    """Return whether the code of a page needs a later Django than this one."""
    return DJANGO.get(page, ()) > django.VERSION


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from codes(constant)


def undefined(code: CodeType, namespace: dict[str, Any]) -> set[str]:
    """Return the names that a block reads, also in the bodies of functions, and that are defined nowhere."""
    used: dict[str, set[str]] = {"LOAD_GLOBAL": set(), "LOAD_NAME": set(), "STORE_NAME": set()}
    for inner in codes(code):
        for step in dis.get_instructions(inner):
            used.get(step.opname, set()).add(str(step.argval))
    known = used["STORE_NAME"] | namespace.keys() | vars(builtins).keys() | {"__annotations__"}  # Python makes this one
    return (used["LOAD_GLOBAL"] | used["LOAD_NAME"]) - known


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a function of the reader's project."""


async def nothing_async(*args: Any, **kwargs: Any) -> None:
    """Stand in for a coroutine function of the reader's project."""


def stand_ins(folder: Path) -> dict[str, Any]:
    """Return what the reader's project has, and the blocks use."""
    order = shop_models.Order.objects.create(pk=7, total=3)
    order.card = "card"
    item = SimpleNamespace(count=3, save=nothing)
    functions = [
        *("book", "call_partner", "charge", "count_stock", "export", "parse", "prepare", "publish_article"),
        *("read_catalogue", "render_page", "save", "send", "send_invoices", "send_reminder", "write_report"),
    ]
    return {
        **vars(shop_models),
        **dict.fromkeys(functions, nothing),
        **{"Item": SimpleNamespace(objects=SimpleNamespace(get=lambda **found: item))},
        **{"TestCase": TestCase, "View": View, "models": models, "transaction": transaction},
        **{"BASE_DIR": folder, "DATABASES": {}, "INSTALLED_APPS": [], "MIDDLEWARE": [], "F": F},
        **{"due_invoices": lambda: ["1"], "pages": lambda *args: ["1"], "order": order, "report": "report"},
        **{"render_report": nothing_async, "render": nothing},
        **{"post": RequestFactory().post("/"), "run": asyncio.run},
        "__name__": "tests.shop.documented",
    }


@pytest.fixture
def celery_app(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Celery app in memory, of this test alone."""
    celery, state = pytest.importorskip("celery"), import_module("celery._state")
    monkeypatch.setattr(state, "_apps", weakref.WeakSet())
    monkeypatch.setattr(state, "_on_app_finalizers", set(state._on_app_finalizers))
    monkeypatch.setattr(state, "default_app", None)
    monkeypatch.setattr(state._tls, "current_app", None)
    app = celery.Celery("documented", broker="memory://", backend="cache+memory://")
    for name in ("mysite", "mysite.celery"):  # where the reader's project has its app
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["mysite.celery"].app = app
    yield app
    app.close()


@pytest.mark.parametrize("page", PAGES)
def test_python_in_the_documentation_is_python(page: str):
    """Every block compiles, and the names that it imports from this package exist."""
    for block in blocks(page):
        if block.reason or too_new(block.page):
            continue
        block.compiled()
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("django_redlock"):
                module = import_module(str(node.module))
                missing = [name.name for name in node.names if not hasattr(module, name.name)]
                assert not missing, f"{page}:{block.line}: {node.module} has no {missing}"


@pytest.mark.django_db(databases=["default", "warehouse"])
@pytest.mark.filterwarnings("ignore:Task name")  # a page may show one task with several options
@pytest.mark.parametrize("page", [page for page in EXECUTED if any(blocks(page)) and not too_new(page)])
@override_settings(TASKS=TASKS)
def test_code_of_the_documentation_runs(page: str, celery_app: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The blocks of a page run one after the other, and every name in a body is defined."""
    found = [block for block in blocks(page) if not block.reason]
    for module, package in NEEDS.items():
        if any(re.search(rf"^from {re.escape(module)}\b", block.text, re.M) for block in found):
            pytest.importorskip(module, reason=f"needs {package}: pip install {package}")
    module = ModuleType("tests.shop.documented")  # a task is found again by the path of its function
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace = vars(module)
    namespace |= stand_ins(tmp_path) | {"app": celery_app}

    with ExitStack() as stack:
        stack.enter_context(isolate_apps("tests.shop"))
        for block in found:
            code = block.compiled()
            if page.startswith(LENIENT):
                namespace |= dict.fromkeys(undefined(code, namespace), nothing)
            result = eval(code, namespace)
            if inspect.iscoroutine(result):
                asyncio.run(result)
            assert not (unknown := undefined(code, namespace)), f"{page}:{block.line}: {sorted(unknown)} are undefined"
            if (redlock := namespace.pop("REDLOCK", None)) is not None:
                accept(redlock, namespace["DATABASES"], f"{page}:{block.line}")
            if not page.startswith(LENIENT):
                reset_locks()  # no block waits for a lock that an earlier one hands to a task
        for call in CALLS.get(page, []):
            exec(call, namespace)


def accept(redlock: dict[str, Any], databases: dict[str, Any], where: str) -> None:
    """Assert that the checks find no mistake in an example of the setting."""
    with (
        patch.dict(connections.settings, dict.fromkeys(databases, connections.settings["default"])),
        override_settings(REDLOCK=redlock),
    ):
        found = [
            each for each in checks.run_checks(tags=["redlock"], databases=["default"]) if each.id in SETTINGS_ERRORS
        ]
    assert not found, f"{where}: {found}"


def test_links_of_the_readme_lead_to_files():
    """The README is not built with the other pages, so nothing else checks its links."""
    links = re.findall(r"""(?:\]\(|src=|srcset=)"?([^)#"]+)""", (ROOT / "README.md").read_text(encoding="utf-8"))

    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_documentation_exist(page: str):
    """Every command of this package in a block for the console has its options, and their values are accepted."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for name, arguments in re.findall(r"^\$ .*manage\.py (redlock_\w+)(.*)$", block, re.MULTILINE):
            words = shlex.split(arguments, comments=True)
            if not any(word.startswith("[") for word in words):  # a synopsis
                load_command_class("django_redlock", name).create_parser("manage.py", name).parse_args(words)
