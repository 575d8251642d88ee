"""Support code behind the public modules of row locks (internal)."""
