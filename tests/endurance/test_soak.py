"""A short soak; the long one is `tox run -e soak -- --minutes 30`."""

import subprocess
import sys
from importlib.util import find_spec

from tests.conftest import needs


def test_soak_finds_no_violation():
    """While processes and a node are killed, no two bodies of a key overlap, no call is lost and no slot is left."""
    needs("packaging", find_spec("packaging"), "pip install packaging")

    done = subprocess.run([sys.executable, "-m", "tests.lab.soak", "--minutes", "0.5"], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing went wrong" in done.stdout
