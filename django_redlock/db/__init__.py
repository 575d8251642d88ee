"""What row locks and fences need behind their public modules (internal)."""
