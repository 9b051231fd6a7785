"""Replays of recorded runs, and predictions from them."""
