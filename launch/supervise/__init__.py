"""What to do when something happens to a process: decisions, with their reasons. Pure."""
