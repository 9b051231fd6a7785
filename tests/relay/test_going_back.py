"""A relay whose region goes back to another position: the run that it leaves takes no more workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from paramserver.common.config.schema import Config
from paramserver.common.errors import ParamServerError, Reason, UnreachableError
from paramserver.common.kinds import ContributionKind
from paramserver.ps.core.events import Joined
from paramserver.relay.region import Link
from paramserver.relay.server import RelayServer


def a_link() -> Any:
    """What a region uses of the link before its first worker has come."""
    settings = SimpleNamespace(kind=ContributionKind.WEIGHTS)
    return SimpleNamespace(
        run_name="run/0", incarnation=2, has_model=False, settings=settings,
        progress=SimpleNamespace(local_steps=4),
    )  # fmt: skip


async def test_no_worker_enters_the_run_that_a_region_leaves() -> None:
    """It would train there while the old server waits for its streams, and contribute over the new server's link."""
    where = {"listen": "127.0.0.1:0", "drain_s": 0.1}
    config = Config(run={"mode": "sync"}, upstream={"server": "127.0.0.1:9"}, server=where)
    server = RelayServer(config, cast(Link, a_link()))
    await server.start()
    assert server.engine.join(Joined(1, 0, process="a")).rank == 0
    server.engine.run.roster.evicted.add(1)
    server.go_back()
    with pytest.raises(UnreachableError) as refused:  # with this reason it joins again
        server.engine.join(Joined(2, 1, process="b"))
    assert refused.value.reason is Reason.DRAINING
    await server.serve()
    assert server.goes_back
    after = RelayServer(config, cast(Link, a_link()), before=server)
    await after.start()
    with pytest.raises(ParamServerError, match="was evicted"):
        after.engine.join(Joined(1, 1, process="b"))
    after.engine.run.roster.restore({0: 2})  # by the state above, which knows of two older processes of the rank
    assert after.engine.join(Joined(2, 0, incarnation=1, process="a")).incarnation == 3
    await after._listening.stop()
    after.engine.close()
