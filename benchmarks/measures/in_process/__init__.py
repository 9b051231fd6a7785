"""Measurements of one part alone, without a network."""
