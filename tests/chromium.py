"""Chromium, for the tests in a browser and for what draws pictures of the pages."""

import os
import shutil
from pathlib import Path
from typing import Any

# Without a window, Chromium takes a third less processor time.
PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = "needs a browser: install chromium-headless-shell, or run `playwright install chromium`"


def start_chromium(playwright: Any) -> Any:
    """Start the one that ``CHROMIUM`` names, one on the path, or Playwright's own; return None if there is none."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)
    if not found and not Path(playwright.chromium.executable_path).exists():
        return None
    return playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
