"""Support code behind the public modules of locked views (internal)."""
