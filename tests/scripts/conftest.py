"""Scripts are run as tests/loopback runs programs."""

from paramserver.tests.loopback.conftest import cluster

__all__ = ["cluster"]
