"""What survives the death of every process."""
