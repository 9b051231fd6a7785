"""The worker: the session with the server, the exchanging optimizer, tasks and the trainer."""

import os

# DataLoader forks while gRPC's threads are at work. Its own handlers for that are skipped then, and now and then
# abort the new process; loaders have no use for gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
