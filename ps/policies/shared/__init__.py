"""What modes are made of: decisions, who waits, rounds, late gradients."""
