"""A worker's conversation with its server: connections, messages and retries."""
