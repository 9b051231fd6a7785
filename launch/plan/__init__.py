"""What to start, and where: from the settings to command lines. Pure, but for reading hosts.yaml."""
