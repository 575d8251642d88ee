"""Everything that makes a lock work in a process: all nodes at once, threads and event loops (internal)."""
