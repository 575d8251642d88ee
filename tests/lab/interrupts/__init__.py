"""
An exception at any moment, as signal handlers, soft time limits and other threads raise them.

The promise: such an exception never ends the renewal of another lock, never blocks another thread, never makes a later
call fail or hang, and never keeps a lock renewed for ever. It may cost the one lock under way up to one lease.

:mod:`.sweep` raises one exception at every event of the interpreter inside the package, one after another, and
:mod:`.storm` raises them from a signal handler at random moments. After each, the lock must be taken again.
"""
