"""ps-runs: runs on record, listed, shown and compared."""
