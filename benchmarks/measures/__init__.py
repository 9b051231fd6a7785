"""What ps-bench measures: a file for each command."""
