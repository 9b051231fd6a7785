"""How the contributions of a round become one payload: each file is one aggregation."""
