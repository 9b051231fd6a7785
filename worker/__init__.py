"""The worker: sessions with the server, strategies, transports, tasks and the training loop."""

import os

# gRPC logs by default even when a connection ends normally. Errors that matter are raised with their reason.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
