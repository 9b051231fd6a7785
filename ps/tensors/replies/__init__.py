"""Weights on their way to workers: whole versions, and differences that move a reference."""
