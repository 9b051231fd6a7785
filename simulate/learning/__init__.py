"""Simulated runs that really train a task."""
