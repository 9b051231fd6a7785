"""What workers that average among themselves may do otherwise: go on without the mean, divide the optimizer's state,
take another of torch's backends."""
