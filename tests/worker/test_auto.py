"""`worker.codec=auto`: the rule, by its formula, and what is measured for it, on links that are only numbers."""

from __future__ import annotations

import math

import pytest

from paramserver.common.config.schema import WorkerConfig
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.worker.transports.auto.measuring import EVERY, Auto, Passed, cost_of
from paramserver.worker.transports.auto.rule import Cost, Measured, choose
from paramserver.worker.transports.transport import Transports

COSTS = {
    "q4": Cost(7.76, 1.97e9, 3.7e9), "raw": Cost(), "bf16": Cost(2.0, 2.3e9, 2.3e9), "int8": Cost(3.94, 7e9, 19.2e9),
}  # fmt: skip
RAW = Cost()
MBIT = 1e6 / 8


def measured(up: float, compute_s: float = 0.1, down: float = math.inf, **more: float) -> Measured:
    return Measured(10_000_000, up * MBIT, down * MBIT, compute_s, more.pop("round_trip_s", 0.0), **more)


def test_the_formula() -> None:
    """S/E + S/(r B) + S/D both ways, and L; 10 MB at 100 and 200 Mbit/s."""
    here = measured(100, 0.5, 200, round_trip_s=0.04)
    up, down = 1e7 / 7e9 + 1e7 / (3.94 * 12.5e6) + 1e7 / 19.2e9, 1e7 / 1.97e9 + 1e7 / (7.76 * 25e6) + 1e7 / 3.7e9
    assert here.exchange_s(COSTS["int8"], COSTS["q4"]) == pytest.approx(up + down + 0.04)
    assert here.period_s(COSTS["int8"], COSTS["q4"]) == pytest.approx(0.5 + up + down + 0.04)
    assert here._replace(is_delayed=True).period_s(RAW, RAW) == pytest.approx(0.8 + 0.4 + 0.04)
    assert here._replace(is_delayed=True).period_s(COSTS["q4"], COSTS["q4"]) == 0.5


@pytest.mark.parametrize("name", ["bf16", "int8", "q4"])
def test_a_codec_pays_where_the_link_is_slower_than_it_is(name: str) -> None:
    cost, below = COSTS[name], COSTS[name].pays_below
    assert below == pytest.approx((1 - 1 / cost.ratio) / (1 / cost.encode + 1 / cost.decode))
    for share in (0.1, 0.9, 1.1, 10):
        assert (cost.seconds(1e7, share * below) < RAW.seconds(1e7, share * below)) == (share < 1)
    assert RAW.pays_below == Cost(1.0, 1e9, 1e9).pays_below == 0


@pytest.mark.parametrize(
    ("up", "compute_s", "chosen"),
    [
        (100_000, 0.1, "raw"), (1000, 1.0, "raw"), (1000, 0.5, "bf16"), (1000, 0.25, "int8"), (100, 0.1, "q4"),
        (1, 9, "q4"),
    ],
)  # fmt: skip
def test_it_takes_the_least_lossy_that_is_enough(up: float, compute_s: float, chosen: str) -> None:
    """Or, where none is, the fastest; within 10 % of the best in any case."""
    found = choose(measured(up, compute_s), COSTS, RAW)
    assert found.codec == chosen
    assert list(found.periods) == ["raw", "bf16", "int8", "q4"]
    assert found.periods[chosen] <= min(found.periods.values()) / 0.9
    is_enough = found.periods[chosen] <= compute_s / 0.9
    assert (found.diloco is None) == is_enough


def test_where_nothing_is_enough_it_says_how_many_local_steps_are() -> None:
    here = measured(10, 1.0, 10)
    (name, local_steps), one_way = choose(here, COSTS, RAW).diloco or ("", 0), 8 / 3.94
    assert (name, local_steps) == ("int8", 50), f"{9 * 2 * 2 * one_way} s of computing at least"
    in_diloco = here._replace(compute_s=10.0, local_steps=10)
    assert choose(in_diloco, COSTS, RAW).diloco == ("int8", 50)
    assert choose(here._replace(is_delayed=True), COSTS, RAW).diloco == ("int8", 10)
    assert choose(measured(0.001, 0.001), COSTS, RAW).diloco is None


def test_another_is_taken_for_a_fifth_more_steps_only() -> None:
    first = choose(measured(300, 0.25), COSTS, RAW)
    assert first.codec == "q4"
    other = measured(300, 0.7)
    assert choose(other, COSTS, RAW).codec == "int8"
    assert choose(other, COSTS, RAW, "q4").codec == "q4"
    assert choose(measured(10, 0.25), COSTS, RAW, "int8").codec == "q4"


LAYOUT = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (512, 512))])


def auto_on(candidates: tuple[str, ...] = ("raw", "int8", "q4"), max_mbit: float | None = None) -> Auto:
    auto = Auto("raw", max_mbit)
    auto.candidates = candidates
    auto.meet(LAYOUT, 0.01, False)
    auto._cost = {name: COSTS[name] for name in ("raw", "bf16", "int8", "q4")}.__getitem__
    auto.joined(True, is_here=False)
    return auto


def contribute(
    auto: Auto, num: int, up: float, down: float = 1000, compute_s: float = 0.02, is_inline: bool = False
) -> None:
    """Over a link of so many Mbit/s each way."""
    size = LAYOUT.exchange_bytes
    for step in range(num):
        cost = COSTS[auto.codec]
        sent = round(size / cost.ratio)
        up_s = size / cost.encode + sent / (up * MBIT) + size / cost.decode + 0.01
        down_s = size / (down * MBIT)
        at_once = Passed(sent, up_s + down_s, size, 0, 0.0)
        auto.counted([at_once if is_inline else Passed(sent, up_s, 0, size, down_s)], compute_s, 1, step)


def test_it_measures_chooses_and_measures_again(caplog: pytest.LogCaptureFixture) -> None:
    auto = auto_on()
    contribute(auto, 4, 100)
    assert auto.codec == "raw" and auto.measures
    contribute(auto, 1, 100)
    assert auto.codec == "q4" and not auto.measures
    contribute(auto, EVERY - 1, 100_000, 100_000)
    assert auto.codec == "q4" and not auto.measures, "whatever happened meanwhile"
    contribute(auto, 1 + 4, 100_000, 100_000)
    assert auto.codec == "q4", "raw would be no fifth faster"
    contribute(auto, EVERY + 4, 100_000, 100_000, compute_s=0.0001)
    assert auto.codec == "q4", "a round trip is most of it"


def test_it_finds_the_bandwidth_under_any_codec() -> None:
    """Small weights come in the same message as the reply."""
    for is_inline in (False, True):
        auto = auto_on()
        contribute(auto, 5, 100, 100, is_inline=is_inline)
        assert auto.codec == "q4"
        contribute(auto, EVERY + 3, 50, 50, is_inline=is_inline)
        found = auto._measured(1)
        assert (found.up / MBIT, found.down / MBIT) == pytest.approx((50, 50), rel=0.05)


def test_what_a_worker_may_not_use_is_not_looked_at() -> None:
    slow = auto_on(max_mbit=5)
    contribute(slow, 4, 1000)
    assert slow._measured(1).up == 5 * MBIT, "worker.max_mbit is the link"
    weights = auto_on(("raw", "bf16"))
    contribute(weights, 5, 1)
    assert weights.codec == "bf16"
    nothing = auto_on(("raw",))
    assert not nothing.measures
    contribute(nothing, 200, 1)
    assert nothing.codec == "raw"


def test_on_this_host_it_is_raw() -> None:
    """Unless the worker says what its link is to be."""
    auto, limited = auto_on(), auto_on(max_mbit=10)
    for item in (auto, limited):
        item.joined(True, is_here=True)
        contribute(item, 5, 10)
    assert (auto.codec, auto.measures, limited.codec) == ("raw", False, "q4")


def test_in_shared_memory_it_is_raw() -> None:
    auto = auto_on()
    contribute(auto, 5, 10)
    assert auto.codec == "q4"
    auto.joined(False, is_here=True)
    assert auto.codec == "raw" and not auto.measures
    auto.joined(True, is_here=False)
    assert auto.codec == "q4"
    assert [transport.name for transport in Transports(WorkerConfig(codec="auto"))._all] == [
        "shared memory",
        "direct",
        "grpc",
    ]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_codecs_are_tried_on_tensors_of_the_models_sizes(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.worker.transports.auto.measuring._SAMPLE_BYTES", 64 << 10)
    layout = Layout(
        [
            TensorSpec("big", Kind.PARAMETER, dtype, (300, 100)),
            TensorSpec("bias", Kind.PARAMETER, dtype, (100,)),
            TensorSpec("n", Kind.BUFFER, "int64", (3,)),
        ]
    )
    for name in ("bf16", "int8", "q4"):
        cost = cost_of(name, layout)
        assert 0 < cost.encode < math.inf and 0 < cost.decode < math.inf
        assert (cost.ratio > 1) == (name != "bf16" or dtype != "bfloat16")
    assert cost_of("raw", layout) == Cost()
