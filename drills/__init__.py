"""Tests of real runs: `ps-launch chaos`, `ps-launch check` and `ps-launch doctor`."""
