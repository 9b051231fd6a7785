"""Jobs under test are real launchers, started as in tests/launch."""

from paramserver.tests.launch.conftest import marked, read_until, wait_until

__all__ = ["marked", "read_until", "wait_until"]
