"""Observers of a run: the sinks of its events."""
