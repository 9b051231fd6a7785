"""Parts of modes: decisions, gates, rounds, late gradients."""
