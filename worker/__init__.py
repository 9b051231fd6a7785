"""The worker: the session with the server, the exchanging optimizer, tasks and the trainer."""

import os

# DataLoader forks while gRPC's threads are at work. Its own handlers for that are skipped then, and now and then
# abort the new process; loaders have no use for gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# What it writes itself, by default even where a connection has ended in good order, nobody can use: an error that
# matters is raised, with its reason.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
