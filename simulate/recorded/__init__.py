"""Recorded runs: the same decisions again, and what is foreseen from them."""
