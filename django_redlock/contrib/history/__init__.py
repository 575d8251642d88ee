"""
Record who held which lock for how long.

Put ``django_redlock.contrib.history`` into ``INSTALLED_APPS`` and run ``migrate``.

Every process keeps its ended locks in memory and writes them every few seconds, in a thread and with a database
connection of its own. No lock waits for the database, and the rows are written outside of the transaction for which the
lock was held. Rows that a killed process had not yet written are lost. If more locks end than can be written, some rows
are dropped.
"""
