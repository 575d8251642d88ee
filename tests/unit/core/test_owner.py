"""The description of the holder in a lock's key."""

from hypothesis import given
from hypothesis import strategies as st

from django_redlock.core.names import (
    MAX_LABEL,
    MAX_REF,
    MAX_STATE,
    Owner,
    decode,
    encode_since,
    fingerprint,
    secret_of,
)

SECRET = "0123456789abcdef" * 2

texts = st.text(max_size=20)
labels, refs = st.text(max_size=MAX_LABEL + 10), st.text(max_size=MAX_REF + 10)
times = st.floats(min_value=0, max_value=1e12)
lease = {"since": times, "ttl": times, "process": texts, "extensions": st.just(0), "hold": times}
states = st.text(max_size=MAX_STATE + 10)
work = {"kind": texts, "label": labels, "ref": refs, "state": states, "call": states}
owners = st.builds(Owner, host=texts, pid=st.integers(0), **lease, **work)


def cut(owner):
    """Return an owner with its texts cut to their greatest length."""
    state, call = owner.state[:MAX_STATE], owner.call[:MAX_STATE]
    return owner._replace(label=owner.label[:120], ref=owner.ref[:1000], state=state, call=call)


@given(owners, times)
def test_value_is_read_as_it_was_written(owner, since):
    """
    A stored value is read as the same holder, its texts cut to their greatest length, with or without its secret; what
    stands for it in lists does not show that.
    """
    value = encode_since(SECRET, owner, since)

    assert decode(value) == decode(value[32:]) == cut(owner)._replace(since=since)
    assert secret_of(value) == SECRET
    assert SECRET[:8] not in fingerprint(value)
