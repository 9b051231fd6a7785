"""The run itself under a virtual clock."""
