"""The run store: one SQLite file with all runs, and the code that writes and reads it."""
