"""Encoding of messages as bytes, and memory that two processes share."""
