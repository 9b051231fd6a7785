"""What a run counts: training steps, batches drawn, metrics of each worker."""
