"""Modes whose workers run their own optimizer; the server averages weights or deltas."""
