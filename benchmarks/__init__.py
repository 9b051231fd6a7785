"""ps-bench: the metrics of the README, measured on the machine at hand with the real programs."""
