"""Parts of modes: decisions, counting, rounds, late gradients."""
