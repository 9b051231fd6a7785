"""The worker: sessions with the server, strategies, transports, tasks and the training loop."""

import os

# DataLoader forks while gRPC's threads run. gRPC's fork handlers then do nothing, and sometimes abort the new process.
# Loader processes do not need gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# gRPC logs by default even when a connection ends normally. Errors that matter are raised with their reason.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
