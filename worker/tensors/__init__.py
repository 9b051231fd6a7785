"""The conversion between a model's tensors and payloads of bytes."""
