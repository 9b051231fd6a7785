"""Experiment trackers: one file each, found by name."""
