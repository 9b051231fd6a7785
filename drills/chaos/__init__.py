"""ps-launch chaos: a real job under random faults, and the proof that nothing was lost or applied twice."""
