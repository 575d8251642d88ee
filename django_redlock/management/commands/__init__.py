"""The commands: ``redlock_list``, ``redlock_inspect``, ``redlock_release`` and others."""
