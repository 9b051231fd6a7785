"""How the contributions of a round become one body: one file, one way."""
