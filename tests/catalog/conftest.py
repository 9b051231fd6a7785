"""Real processes, as in tests/loopback."""

from paramserver.tests.loopback.conftest import cluster

__all__ = ["cluster"]
