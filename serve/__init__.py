"""`ps-serve`: replies to requests with the weights of a run, also while it trains."""
