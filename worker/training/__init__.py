"""What a training loop uses: sessions, data, the optimizer, tasks and artificial delays."""
