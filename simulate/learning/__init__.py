"""Simulated runs that train for real."""
