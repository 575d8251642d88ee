"""All nodes at once, threads and event loops: what makes a lock work in a process (internal)."""
