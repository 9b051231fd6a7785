"""Streams of workers. This package turns messages into events, and effects into messages. It makes no decisions."""
