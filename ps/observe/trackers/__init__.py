"""Experiment trackers. Each file is a tracker, found by its name."""
