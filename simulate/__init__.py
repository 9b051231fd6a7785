"""A run under a virtual clock: the real run and its policies, with workers, links and a server that are told."""
