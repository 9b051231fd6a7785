from paramserver.tests.inner.conftest import forks, run

__all__ = ["forks", "run"]
