"""Pictures that move; the shop of ``example_project`` can be imported in here."""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(CHECKOUT / "example_project"))
