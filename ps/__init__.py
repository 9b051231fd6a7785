"""The server. `core` decides, `engine` carries the decisions out, and `wire` handles messages."""
