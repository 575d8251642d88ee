"""The admin's pages in the themes that many projects use."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.conftest import needs


@pytest.mark.parametrize("theme", ["unfold", "jazzmin"])
def test_the_pages_render_in_a_theme(theme):
    """Every page answers, and a lock is released, with the admin's templates replaced by a theme's."""
    needs(f"django-{theme}", find_spec(theme), f"pip install django-{theme}")

    done = subprocess.run(
        [sys.executable, "-m", "tests.browser.themed", theme], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["pages"] == {
        **{page: [200, True] for page in ("list", "filtered", "live", "lock", "confirmation", "released")},
        "nodes": [200, False],
    }
    assert said["free"] is True
    assert said["renewed"] is False
