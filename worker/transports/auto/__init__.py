"""`worker.codec=auto`: what is measured, and the rule."""
