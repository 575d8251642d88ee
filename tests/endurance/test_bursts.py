"""A few bursts of simultaneous calls; many are `tox run -e bursts`."""

import subprocess
import sys
from importlib.util import find_spec

from tests.conftest import needs


def test_calls_during_a_run_share_one_trailing_run():
    """Ten threads call one key while it runs: all calls end, under one id, after one run with the newest arguments."""
    needs("packaging", find_spec("packaging"), "pip install packaging")

    done = subprocess.run([sys.executable, "-m", "tests.lab.bursts", "--bursts", "2"], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing went wrong" in done.stdout
