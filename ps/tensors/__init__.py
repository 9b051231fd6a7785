"""Weights, optimizer, aggregation, staging, publication: torch, no network."""
