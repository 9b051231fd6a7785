"""Weights on their way to workers: those of a version, and those of a reference that they move by differences."""
