"""Real servers, real processes, real faults: see __main__.py."""
