"""A model's tensors as payloads of bytes."""
