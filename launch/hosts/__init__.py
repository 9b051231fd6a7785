"""The hosts a run uses: the agent that starts processes there, the conversation with it, what is looked at before."""
