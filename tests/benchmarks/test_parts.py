"""What the benchmarks compute, without running one."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from paramserver.benchmarks.baselines import BASELINES
from paramserver.benchmarks.baselines.base import Baseline, choose, split_names
from paramserver.benchmarks.measures.exchange import ExchangeOptions, ratios
from paramserver.benchmarks.measures.in_process.codecs import CodecOptions, measure_codecs
from paramserver.benchmarks.measures.memory_use.memory import expected_parts
from paramserver.benchmarks.measures.step import summed_up, traffic
from paramserver.benchmarks.rig.bandwidth import sender_life
from paramserver.benchmarks.rig.model import synthetic_model
from paramserver.benchmarks.rig.team import slowest, team
from paramserver.benchmarks.rig.turns import Measured, Samples, in_parts, measure
from paramserver.common.errors import ParamServerError, UsageError

MEASUREMENTS = ("exchange", "latency", "round", "race", "xor")


@pytest.mark.parametrize("num_floats", [1, 11, 203, 250_000, 1_000_003])
def test_a_synthetic_model_has_exactly_the_size_asked_for(num_floats: int) -> None:
    model = synthetic_model(num_floats)
    assert sum(parameter.numel() for parameter in model) == num_floats
    assert len(model) <= 200


# ---- turns --------------------------------------------------------------------------------------


def contestant(log: list[str], who: str) -> AbstractContextManager[Measured]:
    @contextmanager
    def opened() -> Any:
        log.append(f"open {who}")
        yield lambda count: log.append(f"{who}{count}") or {"part": [1.0] * count}
        log.append(f"close {who}")

    return opened()


@pytest.mark.parametrize(
    ("together", "expected"),
    [
        (True, "open a, open b, a3, b3, a2, b2, a2, b2, close b, close a"),
        (False, "open a, a3, a2, a2, close a, open b, b3, b2, b2, close b"),
    ],
)
def test_contestants_take_turns(together: bool, expected: str) -> None:
    log: list[str] = []
    contestants = {who: lambda who=who: contestant(log, who) for who in "ab"}
    found = measure(contestants, num_turns=2, per_turn=2, warmup=3, together=together)
    assert log == expected.split(", ")
    assert found == {"a": {"part": [1.0] * 4}, "b": {"part": [1.0] * 4}}  # warm-up is not counted


def test_parts_are_timed_one_after_another() -> None:
    log: list[str] = []
    found = in_parts({"up": lambda: log.append("up"), "down": lambda: log.append("down")})(2)
    assert log == ["up", "down", "up", "down"]
    assert {part: len(times) for part, times in found.items()} == {"up": 2, "down": 2}


# ---- teams --------------------------------------------------------------------------------------


def test_a_member_that_fails_fails_the_team_with_its_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ParamServerError, match="ConnectionRefused"), team(1, sender_life, port):
        pass


def test_a_round_takes_what_its_slowest_member_takes() -> None:
    assert slowest([{"round": [1.0, 5.0]}, {"round": [2.0, 3.0]}]) == {"round": [2.0, 5.0]}


# ---- baselines --------------------------------------------------------------------------------------


def test_every_peer_says_what_it_is() -> None:
    for stem in BASELINES.names():
        baseline: Baseline = BASELINES.load(stem)()
        assert baseline.name.replace("-", "_") == stem
        assert baseline.install
        assert isinstance(baseline.is_installed, bool)
        assert any(baseline.offers(measurement) for measurement in MEASUREMENTS)


def test_names_of_peers() -> None:
    assert split_names(None) == split_names("") == []
    assert split_names("torch-rpc, GLOO,gloo") == ["torch_rpc", "gloo"]
    assert split_names("all") == BASELINES.names()
    with pytest.raises(UsageError) as wrong:
        split_names("glo")
    assert wrong.value.fix == "did you mean 'gloo'?"


def test_a_peer_that_is_not_installed_is_said_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BASELINES.load("ray"), "modules", ("no_such_module",))
    monkeypatch.setattr(BASELINES.load("iperf"), "programs", ("no-such-program",))
    baselines, lines = choose(["ray", "iperf", "unary", "ddp"], "exchange")
    assert [baseline.name for baseline in baselines] == ["unary"]
    assert lines == [
        "ray: NOT INSTALLED, not measured (pip install ray)",
        "iperf: NOT INSTALLED, not measured (apt-get install iperf3)",
        "ddp: has no part in exchange",
    ]


# ---- formulas -----------------------------------------------------------------------------------


def test_sizes_of_a_sweep() -> None:
    def sizes(**given: Any) -> list[int]:
        return ExchangeOptions(100, 1, "sync", "sgd", "raw", "grpc", **given).sizes

    assert sizes() == [100_000_000]
    assert sizes(sweep=True, max_mb=1) == [4000, 16000, 64000, 256000]
    assert sizes(sweep=True)[-1] == 4000 * 4**9  # a GB
    assert sizes(sweep=True, min_kb=1000, max_mb=1) == [1_000_000]


def test_a_ratio_above_one_means_that_ours_is_faster() -> None:
    ours, theirs = (
        {"up_ms": 10.0, "down_ms": 10.0, "exchange_ms": 30.0},
        {"up_ms": 20.0, "down_ms": 5.0, "whole_ms": 60.0},
    )
    assert ratios(ours, theirs) == {"up": 2.0, "down": 0.5, "whole": 2.0}


@pytest.mark.parametrize(
    ("mode", "optimizer", "workers", "transport", "expected"),
    [
        ("sync", "adam", 16, "direct", (1, 2, 1, 4, 1)),
        ("sync", "sgd", 2, "direct", (1, 0, 1, 2, 1)),
        ("async", "adam", 16, "direct", (1, 2, 1, 4, 4)),
        ("ssp", "adam", 1, "direct", (1, 2, 1, 1, 1)),
        ("localsgd", "adam", 4, "direct", (1, 0, 1, 4, 1)),
        ("sync", "adam", 16, "shared", (1, 2, 1, 16, 1)),
    ],
)
def test_what_a_server_has_to_hold(mode: str, optimizer: str, workers: int, transport: str, expected: Any) -> None:
    assert tuple(expected_parts(mode, optimizer, workers, transport).values()) == expected


def test_traffic_of_a_step() -> None:
    found = traffic(100.0, 4)
    assert found == {"parameter_server": 200.0, "parameter_server_shared_link": 800.0, "ring_all_reduce": 150.0}
    assert traffic(100.0, 1)["ring_all_reduce"] == 0


def test_a_step_is_divided() -> None:
    workers: list[Samples] = [
        {"compute": [6.0, 6.0], "transfer": [1.0, 1.0], "gate_wait": [3.0, 1.0]},
        {"compute": [8.0, 4.0], "transfer": [1.0, 1.0], "gate_wait": [1.0, 3.0]},
    ]
    first, second = summed_up(workers)
    assert first == {
        "compute_ms": 6000.0, "transfer_ms": 1000.0, "wait_ms": 1000.0, "apply_ms": 1000.0, "step_ms": 9000.0,
        "overhead": pytest.approx((0.4 + 0.25) / 2),
    }  # fmt: skip
    assert second["wait_ms"] == 1000.0


# ---- what is written ------------------------------------------------------------------------------


def test_codecs_are_measured_as_workers_use_them() -> None:
    report = measure_codecs(CodecOptions(["raw", "int8", "powersgd"], mb=4, runs=1))
    assert [round(result["ratio"], 2) for result in report.results.values()] == [1.0, 3.94, 500.0]
    assert all(min(result.values()) > 0 for result in report.results.values())
