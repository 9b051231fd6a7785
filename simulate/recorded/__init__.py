"""Recorded runs: replays, and what they foresee."""
