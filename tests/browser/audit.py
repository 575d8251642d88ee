"""Axe, which finds what keeps people from reading or using a page."""

from importlib.resources import files
from typing import Any

import pytest

# The head and the sidebar of the admin are Django's. Of a long list the first rows stand for the others.
OURS = {"include": [["#content"]], "exclude": [["#result_list tbody tr:nth-child(n+5)"]]}
# The admin's search field has an icon for a label, and a help text.
OPTIONS = {"resultTypes": ["violations"], "rules": {"label-title-only": {"enabled": False}}}
SERIOUS = {"serious", "critical"}
RUN = """async ([context, options]) => {
    document.getAnimations().forEach(each => each.finish());  // a colour on its way is none to judge
    const results = await axe.run(context, options);
    return results.violations.map(each => ({
        id: each.id,
        impact: each.impact,
        where: each.nodes.map(node => `${node.html} ${node.any.concat(node.all).map(check => check.message)}`),
    }));
}"""


def serious(page: Any, context: Any = OURS) -> list[str]:
    """Return what axe calls serious or critical in the content of a page, or in other parts of it."""
    package = pytest.importorskip("axe_playwright_python", reason="needs axe: pip install axe-playwright-python")
    page.evaluate((files(package) / "axe.min.js").read_text())
    found = [each for each in page.evaluate(RUN, [context, OPTIONS]) if each["impact"] in SERIOUS]
    return [f"{each['id']}: {where}" for each in found for where in each["where"]]
