"""How the contributions of a round become one payload: one file, one way."""
