"""`worker.codec=auto`: the measurements, and the rule that chooses a codec from them."""
