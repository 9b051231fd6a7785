"""The measurements of ps-bench, a file for each command."""
