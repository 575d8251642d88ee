"""
A soak: singleton tasks under load while children, workers and a lock node are killed.

Run it with ``tox run -e soak -- --minutes 30``.

Two workers and beat run tasks of 60 keys. Every body records when it began and when it was last active. Afterwards the
soak checks whether two bodies of one key ever overlapped, whether an accepted call never ended, and whether a slot was
left behind.
"""
