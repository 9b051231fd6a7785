"""How payloads travel between a worker and a shard: one file for each place bytes may go, one for each direction."""
