"""The hosts a run uses: the agent that starts processes there, the connection to it, and checks before a start."""
