"""ps-launch chaos: runs a real job under random faults, and proves that nothing was lost or applied twice."""
