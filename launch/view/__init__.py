"""What children say, and how people see it."""
