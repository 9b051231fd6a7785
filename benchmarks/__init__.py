"""ps-bench: measures the real programs over loopback."""
