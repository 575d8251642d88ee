"""
The fields of a listing, which are read a column at a time.
"""

import pytest

from django_redlock.core.protocol import ABSENT, HIGHEST
from django_redlock.nodes.redis.wire import all_seconds_left, fencing_token, fencing_tokens, seconds_left, texts

USUAL = "1795000000000000"


ODD = ["0", "", "-5", str(HIGHEST), "9" * 16, "9" * 17, "soon", "1" * 15 + "²", "१" * 16]


@pytest.mark.parametrize("odd", [*ODD, USUAL])
def test_column_of_tokens_is_read_as_each_token_is(odd: str):
    """One odd token changes no other, wherever it is in the column."""
    for column in ([odd], [odd, USUAL], [USUAL, odd, USUAL], [USUAL, "12", odd], ["1" * 15, "1" * 17, odd]):
        assert fencing_tokens(column) == [fencing_token(each) for each in column]


@pytest.mark.parametrize("odd", [-2, -1, 0, 1, HIGHEST, 10**18, 9e18, 5.9, "7", True])
def test_column_of_times_is_read_as_each_time_is(odd: object):
    """One key without expiry, or one that is gone, changes no other time."""
    for column in ([odd], [odd, 1500], [1500, odd, 20]):
        assert all_seconds_left(column) == [seconds_left(each) for each in column]


def test_columns_of_times():
    """The usual column, an empty one, and one with all that a time can mean."""
    assert all_seconds_left([1500, 20]) == [1.5, 0.02]
    assert all_seconds_left([]) == []
    assert all_seconds_left([1500, -1, -2]) == [1.5, None, ABSENT]


@pytest.mark.parametrize("column", [[None], ["a", 5], [["a"]], [b"a"]])
def test_column_that_has_more_than_texts_is_refused(column: list[object]):
    """Whatever a node sends, a name is a text."""
    with pytest.raises(TypeError, match="no text"):
        texts(column)
