"""What a run counts: training steps, batches drawn, figures of each worker."""
