"""Parts of the all-reduce strategies: groups and backends, delayed means, sharded optimizer state."""
