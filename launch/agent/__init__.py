"""Processes and their ends: the agent that starts them where they are to run, and the launcher's side of it."""
