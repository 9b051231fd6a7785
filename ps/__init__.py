"""The server: the run decides, the engine carries out, `wire` translates."""
