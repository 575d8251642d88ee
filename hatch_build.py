"""
Fill in what depends on the address of the repository: the project's URLs, and the links of the README.

In the README, a link is a path in the repository. Where the README is shown outside of it, each becomes an address.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"\[([^]]*)\]\((?!https?://|#)([^)]+)\)")
PICTURE = re.compile(r'\b(src|srcset)="(?!https?://)([^"]+)"')


class RepositoryHook(MetadataHookInterface):
    """Reads ``repository`` of ``[tool.hatch.metadata.hooks.custom]``, the only place with the address."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the two fields that pyproject.toml calls dynamic."""
        repository, root = self.config["repository"], Path(self.root)
        source = (root / "django_redlock" / "__init__.py").read_text(encoding="utf-8")
        (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
        # The files of this release: a later one may move them. A picture is wanted itself, not the page that shows it.
        pages, files = f"{repository}/blob/v{version}", f"{repository}/raw/v{version}"
        text = (root / "README.md").read_text(encoding="utf-8")
        text = LINK.sub(lambda link: f"[{link[1]}]({pages}/{link[2]})", text)
        text = PICTURE.sub(lambda picture: f'{picture[1]}="{files}/{picture[2]}"', text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {
            "Homepage": repository,
            "Documentation": f"{pages}/docs/index.md",
            "Changelog": f"{pages}/CHANGELOG.md",
            "Issues": f"{repository}/issues",
            "Source": repository,
        }
