"""Short runs of two instruments; the long ones are `tox run -e bursts` and `tox run -e soak -- --minutes 30`."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.conftest import needs


@pytest.mark.parametrize("command", ["bursts --bursts 2", "soak --minutes 0.5"])
def test_nothing_goes_wrong(command: str):
    """
    Ten threads call one key while it runs: all calls end, under one id, after one run with the newest arguments. While
    processes and a node are killed, no two bodies of a key overlap, no call is lost and no slot is left.
    """
    needs("packaging", find_spec("packaging"), "pip install packaging")

    done = subprocess.run([sys.executable, "-m", *f"tests.lab.{command}".split()], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing went wrong" in done.stdout
