"""ps-runs: lists, shows and compares the runs of a run store."""
