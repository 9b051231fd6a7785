"""What means nothing where workers average among themselves is refused before anybody comes."""

from __future__ import annotations

import pytest

from paramserver.common.combinations import check
from paramserver.common.config.schema import Config
from paramserver.common.config.sources import load_config
from paramserver.common.errors import UsageError
from paramserver.ps.engine.modes import make_policy
from paramserver.worker.training.member import choices_of


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"worker": {"reply_codec": "q4"}},
            "worker.reply_codec is q4, and mode allreduce, whose workers average among themselves",
        ),
        ({"worker": {"zero": 3}}, "fully_shard's collectives are of processes that stay the same"),
        ({"worker": {"reply_codec": "int8"}}, "worker.reply_codec is int8"),
        ({"store": {"polyak": 0.9}}, "store.polyak is 0.9"),
        ({"store": {"clip_norm": 1.0}}, "store.clip_norm is 1, and mode allreduce, which does not take one step"),
        ({"store": {"max_norm": 1.0}}, "store.max_norm is 1"),
        ({"policy": {"aggregation": "median"}}, "policy.aggregation is median, and mode allreduce"),
        ({"run": {"steps": 3}, "policy": {"staleness": 3}}, "policy.staleness is 3, and the run has 3 training steps"),
        ({"worker": {"zero": 1}, "policy": {"staleness": 1}}, "worker.zero is 1, and policy.staleness is 1"),
        ({"worker": {"zero": 1}, "run": {"mode": "sync"}}, "worker.zero is 1, and mode sync, whose workers do not"),
        (
            {"policy": {"delayed_update": True}},
            "mode allreduce, whose workers compute on nothing but the newest weights",
        ),
    ],
)
def test_a_setting_of_what_passes_the_server_is_refused(settings, message):
    with pytest.raises(UsageError) as found:
        make_policy(Config.model_validate(settings | {"run": {"mode": "allreduce", **settings.get("run", {})}}))
    assert message in found.value.message
    assert found.value.fix


def test_a_stage_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match="2 is not available: 1 shards optimizer state, and 3 also gradients"):
        load_config(None, {"run.mode": "allreduce", "worker.zero": 2}, [], {})


def test_parameters_are_not_divided_among_workers_that_come_and_go():
    message = "worker.zero is 3, and each worker is one process"
    with pytest.raises(UsageError, match=message) as found:
        check(choices_of(Config.model_validate({"worker": {"zero": 3}})))
    assert "--group" in found.value.fix


@pytest.mark.parametrize("staleness", [-1, 65])
def test_staleness_out_of_bounds_is_refused(staleness):
    with pytest.raises(UsageError, match="flag --staleness"):
        load_config(None, {"run.mode": "allreduce", "policy.staleness": staleness}, [], {}).check_options(["allreduce"])
