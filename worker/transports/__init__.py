"""How payloads travel between a worker and a shard: encodings, transports, and one file per direction."""
