"""How bodies travel between worker and server."""
