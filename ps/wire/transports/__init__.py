"""How payloads travel between the server and a worker: one file for each place bytes may go."""
