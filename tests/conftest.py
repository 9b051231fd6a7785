"""For all tests: nothing is forked into gRPC's own fork handlers, which abort the new process now and then."""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
