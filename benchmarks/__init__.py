"""ps-bench: the figures of the README, measured on the machine at hand with the real programs."""
