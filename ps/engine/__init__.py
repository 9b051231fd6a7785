"""Carries a run out: its effects on tensors, streams, snapshots and observers."""
