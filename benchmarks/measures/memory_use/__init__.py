"""Measurements of the memory of processes."""
