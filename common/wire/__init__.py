"""Messages as bytes, and memory that two processes share."""
