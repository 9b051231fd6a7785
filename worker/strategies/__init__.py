"""What a training step does with its contribution."""
