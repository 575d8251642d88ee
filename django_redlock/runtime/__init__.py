"""The machinery of this process: its clock, its threads, what wakes them, and its own identity across forks."""
