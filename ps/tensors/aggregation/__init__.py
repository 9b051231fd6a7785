"""Aggregations, which combine the contributions of a round into one payload. Each file is an aggregation."""
