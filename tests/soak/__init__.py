"""
A soak: singleton tasks under load while children, workers and a lock node are killed.

Run it with ``tox run -e soak -- --minutes 30``.

Two workers and beat run tasks of 200 keys. Every body records when it began and when it was last seen, so that it
can be told afterwards whether two bodies of one key ever overlapped, whether a call that was accepted never ended, and
whether a slot was left behind.
"""
