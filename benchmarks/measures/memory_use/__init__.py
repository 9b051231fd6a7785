"""Measurements of what processes hold in memory."""
