"""Tensor work of the server: weights, optimizer, aggregation, staging, publication. This package uses no network."""
