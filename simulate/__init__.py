"""A run under a virtual clock: the real run and its policies, with simulated workers, links and server."""
