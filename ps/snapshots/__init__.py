"""Snapshots: files from which a run continues after all its processes have ended."""
