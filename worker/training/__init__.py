"""What a training loop uses: data, optimizer, tasks, delays."""
