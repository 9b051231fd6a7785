"""Synchronisation modes: pure state machines, one file each, found by name."""
