"""Sphinx settings; build with `tox run -e docs`."""

import re
import zlib
from importlib.metadata import version as version_of
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import django
from django.conf import settings
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

project = "django_redlock"
author = "django_redlock contributors"
copyright = author
release = version = version_of("django-redlock")

extensions = [
    "myst_parser",
    "sphinx_copybutton",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_design",
]
exclude_patterns = ["_build"]
nitpicky = True  # a reference that leads nowhere is a warning, and the build turns warnings into errors
# Sphinx looks these up in the module of the decorator that checks the arguments, not in that of the decorated function.
nitpick_ignore = [
    ("py:class", name)
    for name in (
        *("BaseCommand", "Command", "CommandKeys", "Decorated", "FenceOptions", "Fenced", "Handle", "Key", "Many"),
        *("RowLock", "RowOptions", "SkippingLock", "Wait"),
    )
]
nitpick_ignore += [("py:obj", "typing.~P")]  # the parameters of a task
nitpick_ignore += [("py:class", "MemoryNode")]  # howto/testing.md has what a test may set on it
# None of these projects lists its names.
nitpick_ignore_regex = [("py:class", r"debug_toolbar\..*|prometheus_client\..*|valkey\..*")]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"  # prompts and output are not part of a command

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_use_type_comments = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"django_redlock {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_logo = html_favicon = "_static/mark.svg"
# In light and in dark: what the theme takes for its own parts, and what the drawings are made of.
COLOURS = {
    "color-brand-primary": ("#b42318", "#ff8f80"),
    "color-brand-content": ("#0a58ca", "#7db4ff"),
    "color-sidebar-link-text": ("var(--color-foreground-primary)",) * 2,
    "color-sidebar-link-text--top-level": ("var(--color-foreground-primary)",) * 2,
    "drawing-ink": ("#1f2328", "#e6edf3"),
    "drawing-grey": ("#59636e", "#a3adb8"),
    "drawing-line": ("#8c959f", "#6e7681"),
    "drawing-panel": ("#f3f5f7", "#1e2126"),
    "drawing-blue": ("#0b57b0", "#79b8ff"),
    "drawing-blue-fill": ("#dbe9fb", "#112f52"),
    "drawing-green": ("#1a7f37", "#56d36f"),
    "drawing-green-fill": ("#d3f0da", "#12381d"),
    "drawing-amber": ("#9a6700", "#e3b341"),
    "drawing-amber-fill": ("#fbefc6", "#3d2f0c"),
    "drawing-red": ("#c1121f", "#ff7b7b"),
    "drawing-red-fill": ("#fbdcdc", "#4a1a1c"),
}
html_theme_options = {
    "light_css_variables": {name: light for name, (light, _) in COLOURS.items()},
    "dark_css_variables": {name: dark for name, (_, dark) in COLOURS.items()},
}

# The models and the decorators of the reference are imported, which needs settings but no server.
settings.configure(
    DEBUG=True,
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django_redlock"],
    REDLOCK={"default": {"NODES": ["memory://docs"]}},
)
django.setup()

# Other projects' names that the reference links to. The list stands in for their inventories, so that the build needs
# no network and gives the same result everywhere.
NAMES = Path(__file__).parent / "external-names.txt"
INTERNAL = re.compile(r"(django_redlock\.[\w.]+|[A-Z])")  # ... and a type variable
GROUP = re.compile(
    r"(<p class=.caption.*?<span[^>]*>)([^<]+)(</span></p>)\s*(<ul.*?)(?=<p class=.caption|$)", re.DOTALL
)


def inventories(folder: Path) -> dict[str, tuple[str, str]]:
    """Write an inventory for each project of the list; return the mapping that intersphinx wants."""
    lines: dict[str, list[str]] = {}
    sites: dict[str, str] = {}
    for line in NAMES.read_text().splitlines():
        match line.split():
            case [site, address] if "://" in address:
                sites[site] = address
            case [site, role, name, page]:
                lines.setdefault(site, []).append(f"{name} {role} 1 {page} -\n")
    folder.mkdir(parents=True, exist_ok=True)
    for site, entries in lines.items():
        head = f"# Sphinx inventory version 2\n# Project: {site}\n# Version:\n# The rest is compressed with zlib.\n"
        (folder / f"{site}.inv").write_bytes(head.encode() + zlib.compress("".join(entries).encode()))
    return {site: (address, str(folder / f"{site}.inv")) for site, address in sites.items()}


intersphinx_mapping = inventories(Path(__file__).parent / "_build" / "inventories")


def public_name(app: Sphinx, env: Any, node: pending_xref, content: nodes.TextElement) -> nodes.Node | None:
    """
    Resolve the name that an annotation has, which is where a class is written, to the name that users import.

    A type that exists and is not public is shown as text: there is nothing to read about it.
    """
    target = str(node.get("reftarget", ""))
    if node.get("refdomain") != "py" or not INTERNAL.fullmatch(target):
        return None
    objects = env.get_domain("py").objects
    last = target.rpartition(".")[2]
    public = [name for name in objects if name.rpartition(".")[2] == last and same(name, target)]
    if public:
        found = objects[public[0]]
        address = app.builder.get_relative_uri(node["refdoc"], found.docname)
        return nodes.reference("", "", content, internal=True, refuri=f"{address}#{found.node_id}", reftitle=public[0])
    return content if len(last) == 1 or same(target, target) else None


def same(name: str, other: str) -> bool:
    """Return whether two names are those of one thing."""
    try:
        return resolve_name(name) is resolve_name(other)
    except (AttributeError, ImportError, ValueError):
        return False


def fold_groups(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Let groups of the sidebar fold: a toctree with the caption *How-to: Locks* is the group *Locks* of *How-to*."""
    last = ""

    def fold(group: re.Match[str]) -> str:
        nonlocal last
        before, names, after, pages = group.groups()
        caption, _, name = names.partition(": ")
        heading = "" if caption == last else f"{before}{caption}{after}"
        last = caption
        unfolded = " open" if "current-page" in pages else ""
        return heading + (f"<details{unfolded}><summary>{name}</summary>{pages}</details>" if name else pages)

    context["furo_navigation_tree"] = GROUP.sub(fold, context.get("furo_navigation_tree", ""))


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", fold_groups, priority=900)  # after the theme has made the tree
    app.connect("missing-reference", public_name)
