"""Modes whose workers step themselves, and whose weights, or how far they went, are averaged."""
