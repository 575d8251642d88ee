"""Support code behind the public modules of row locks and views (internal)."""
