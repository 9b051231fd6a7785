"""Reads the output of children, and shows it to people."""
