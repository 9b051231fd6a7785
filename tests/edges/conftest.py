from paramserver.tests.replica_group.conftest import forks, run

__all__ = ["forks", "run"]
