"""Commands for operators, and ``@locked_command`` for those of a project."""
