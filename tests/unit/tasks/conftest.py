import django

collect_ignore_glob = [] if django.VERSION >= (6, 0) else ["test_*.py"]  # before that there are no such tasks
