"""
Who held what for how long: put ``django_redlock.contrib.history`` into ``INSTALLED_APPS`` and run ``migrate``.

Every process keeps what ended in memory and writes it every few seconds, in a thread and with a database connection of
its own: a lock waits for no database, and is written down outside of the transaction that it was held for. What a
process that is killed had not written yet is lost, and when much more happens than can be written, some is dropped.
"""
