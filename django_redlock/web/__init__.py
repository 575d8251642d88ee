"""What locked views need behind their public modules (internal)."""
