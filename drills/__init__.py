"""What attacks a run and proves what happened: `ps-launch chaos` and `ps-launch check`."""
