"""The worker: the session with the server, the exchanging optimizer, tasks and the trainer."""
