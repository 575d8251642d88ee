"""Commands for operators, and ``@locked_command`` for a project's own commands (internal)."""
