"""Each assumption is needed: without it an oracle objects."""

import pytest

from tests.simulation.assumptions import ASSUMPTIONS, Assumption, need


@pytest.mark.parametrize("assumption", ASSUMPTIONS, ids=lambda assumption: assumption.broken.replace(" ", "-"))
def test_assumption_is_needed(assumption: Assumption):
    """Each assumption of a guarantee is needed, which the oracles find."""
    found = need(assumption)

    assert found.what is not None, assumption.broken
