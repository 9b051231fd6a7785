"""Strategies: how a training step's contribution is exchanged."""
