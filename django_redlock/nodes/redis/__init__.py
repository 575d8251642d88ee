"""A Redis or Valkey server as a node (internal)."""
