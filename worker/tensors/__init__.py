"""A model's tensors as bodies of bytes."""
