"""Measures one worker's exchange and its parts (ours.py) beside baselines, for one size or many.

All contestants of a size take turns, except where they do not fit into memory together. GB are 10^9
bytes, and for a codec those it sends. A ratio is our rate through the baseline's: above 1 ours is faster.
Our exchange has the optimizer's step on the server, a check for NaN, and ends with the weights in the
parameters. A baseline's `exchange` only carries tensors there and back; its `whole` has a step of SGD and
the weights written into a tensor of the worker's too, and is what ours is comparable with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import RenderableType

from ..baselines.run import chosen_running
from ..output.machine import available_bytes
from ..output.report import Report, median
from ..output.tables import number, number_table, page
from ..rig.ours import OurExchange, variants_of
from ..rig.turns import Contestant, Samples, measure

_NUM_WARMUP = 3
_LARGE_BYTES, _LARGE_WARMUP = 250_000_000, 1  # where one exchange of a baseline may take half a minute
_PER_TURN_BELOW_BYTES = 1_000_000
_PER_TURN = 10  # exchanges in one turn, of small sizes
# Payloads that one contestant holds, servers and workers together: an upper estimate.
_OUR_PAYLOADS, _BASELINE_PAYLOADS, _USABLE = 18, 8, 0.6
_RATIOS = ("up", "down", "exchange", "whole")
_PARTS = ("exchange", "encode", "up", "gate_wait", "down")


@dataclass(frozen=True)
class ExchangeOptions:
    mb: int
    runs: int
    mode: str
    optimizer: str
    codec: str
    transport: str
    tls: bool = False
    sweep: bool = False
    min_kb: int = 4
    max_mb: int = 1100
    watched: tuple[str, ...] = ()
    device: str = "cpu"

    @property
    def sizes(self) -> list[int]:
        """Returns sizes in bytes; in a sweep each is four times the last."""
        if not self.sweep:
            return [self.mb * 1_000_000]
        most, sizes = self.max_mb * 1_000_000, [self.min_kb * 1000]
        while sizes[-1] * 4 <= most:
            sizes.append(sizes[-1] * 4)
        return sizes


def measure_exchange(options: ExchangeOptions, baseline_names: Sequence[str] = ()) -> Report:
    """Measure every size, with the installed baselines."""
    with chosen_running(baseline_names, "exchange") as (baselines, lines):
        found = [_measure_size(options, num_bytes, baselines) for num_bytes in options.sizes]
    results: dict[str, Any] = {"sizes": found} if options.sweep else found[0]
    notes = [*lines, *_notes(options, found)]
    config = {**vars(options), "workers": 1, "baselines": [baseline.name for baseline in baselines]}
    return Report("exchange", config, results, _tables(options, found, notes))


def _measure_size(options: ExchangeOptions, num_bytes: int, baselines: Sequence[Any]) -> dict[str, Any]:
    per_turn = _PER_TURN if num_bytes < _PER_TURN_BELOW_BYTES else 1
    warmup = _NUM_WARMUP if num_bytes < _LARGE_BYTES else _LARGE_WARMUP
    num_floats, num_steps = num_bytes // 4, warmup + options.runs * per_turn
    ours = {
        variant.name: OurExchange(
            variant, options.mode, options.optimizer, options.codec, num_floats, num_steps, options.device
        )
        for variant in variants_of(options.transport, options.tls, options.watched)
    }
    contestants: dict[str, Callable[[], Contestant]] = {name: value.opened for name, value in ours.items()}
    contestants |= {baseline.name: partial(baseline.exchange, num_floats) for baseline in baselines}
    together = (
        num_bytes * (_OUR_PAYLOADS * len(ours) + _BASELINE_PAYLOADS * len(baselines)) < _USABLE * available_bytes()
    )
    found = measure(contestants, num_turns=options.runs, per_turn=per_turn, warmup=warmup, together=together)
    mine = {name: our_metrics(found[name], value) for name, value in ours.items()}
    theirs = {baseline.name: baseline_metrics(found[baseline.name], num_bytes) for baseline in baselines}
    times = {name: item["exchange_ms"] for name, item in mine.items()}
    return {
        "size_mb": num_bytes / 1e6,
        "in_turns": together,
        "warmup": warmup,
        "ours": mine,
        "baselines": theirs,
        "ratios": {
            name: {baseline: ratios(metric, theirs[baseline]) for baseline in theirs} for name, metric in mine.items()
        },
        "tls": {
            value.variant.transport: times[name] / times[value.variant.transport]
            for name, value in ours.items()
            if value.variant.is_tls and not value.variant.watched
        },
        "watched": {
            name: times[name] / times[name.removesuffix(f", {value.variant.watched}")]
            for name, value in ours.items()
            if value.variant.watched
        },
    }


def our_metrics(samples: Samples, run: OurExchange) -> dict[str, Any]:
    """Returns times in ms and rates in GB/s, median and best of each."""
    beyond = [a - b for a, b in zip(samples["up_reply"], samples["up"], strict=True)]
    found: dict[str, Any] = {
        "sent_mb": run.facts.sent_bytes / 1e6,
        "transport": run.facts.transport,
        "reply_ms": max(0.0, median(beyond)) * 1e3,
    }
    found |= _times({part: samples[part] for part in _PARTS})
    return found | _rates(samples, {"up": run.facts.sent_bytes, "down": run.facts.payload_bytes})


def baseline_metrics(samples: Samples, num_bytes: int) -> dict[str, float]:
    """Returns the same for the parts of a baseline."""
    return _times(samples) | _rates(samples, dict.fromkeys({"up", "down"} & samples.keys(), num_bytes))


def ratios(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    """Returns their median time divided by ours, for common parts; `whole` by our exchange."""
    parts = {"up": "up", "down": "down", "exchange": "exchange", "whole": "exchange"}
    return {part: theirs[f"{part}_ms"] / ours[f"{mine}_ms"] for part, mine in parts.items() if f"{part}_ms" in theirs}


def _times(samples: Samples) -> dict[str, float]:
    found: dict[str, float] = {}
    for part, times in samples.items():
        found |= {f"{part}_ms": median(times) * 1e3, f"{part}_best_ms": min(times) * 1e3}
    return found


def _rates(samples: Samples, num_bytes: dict[str, int]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part, size in sorted(num_bytes.items()):
        found[f"{part}_gb_s"] = size / median(samples[part]) / 1e9
        found[f"{part}_best_gb_s"] = size / min(samples[part]) / 1e9
    return found


def _notes(options: ExchangeOptions, found: list[dict[str, Any]]) -> list[str]:
    """Returns notes on the limits of the metrics."""
    notes = []
    for variant in variants_of(options.transport, options.tls, options.watched):
        for entry in found:
            if (transport := entry["ours"][variant.name]["transport"]) != variant.transport:
                notes.append(f"{variant.name}: NOT TAKEN at {entry['size_mb']:g} MB, the transport was {transport}")
    for entry in found:
        text = ", ".join(f"{transport} {ratio:.2f} x" for transport, ratio in entry["tls"].items())
        notes += [f"{entry['size_mb']:g} MB in TLS, of the same without: {text}"] if text else []
        text = ", ".join(f"{name} {ratio:.3f} x" for name, ratio in entry["watched"].items())
        notes += [f"{entry['size_mb']:g} MB, time through that of a bare server: {text}"] if text else []
    apart = [f"{item['size_mb']:g}" for item in found if not item["in_turns"]]
    if apart:
        notes.append(f"one after another, not in turns, for lack of memory: {', '.join(apart)} MB")
    return notes


def _tables(options: ExchangeOptions, found: list[dict[str, Any]], notes: list[str]) -> RenderableType:
    how = f"{options.mode}, {options.optimizer}, codec {options.codec}, {options.device}"
    title = f"float32, {how}; {options.runs} runs, medians"
    if options.sweep:
        return page(f"Sweep of sizes, {title}", _sweep_table(found), notes=notes)
    only = found[0]
    parts: list[RenderableType] = [_parts_table(only)]
    if only["baselines"]:
        parts += ["", _ratio_table(only)]
    return page(f"{only['size_mb']:,g} MB {title}", *parts, notes=notes)


def _parts_table(found: dict[str, Any]) -> RenderableType:
    times = ["exchange", "best", "whole", "encode", "up", "gate_wait", "reply", "down"]
    columns = ["ms", *times, "up GB/s", "best", "down GB/s", "best"]
    keys = ["exchange_ms", "exchange_best_ms", "whole_ms", "encode_ms", "up_ms", "gate_wait_ms", "reply_ms", "down_ms"]
    rates = ["up_gb_s", "up_best_gb_s", "down_gb_s", "down_best_gb_s"]
    rows = [
        [name, *(number(baseline.get(key)) for key in keys), *(number(baseline.get(key), "{:.2f}") for key in rates)]
        for name, baseline in (found["ours"] | found["baselines"]).items()
    ]
    return number_table(columns, rows, bold=range(len(found["ours"])))


def _ratio_table(found: dict[str, Any]) -> RenderableType:
    rows = [
        [f"{name} / {baseline}", *(number(ratio.get(part), "{:.2f}") for part in _RATIOS)]
        for name, beside in found["ratios"].items()
        for baseline, ratio in beside.items()
    ]
    return number_table(["our rate / the baseline's", *_RATIOS], rows)


def _sweep_table(found: list[dict[str, Any]]) -> RenderableType:
    """Returns the table of an exchange's ms by size, and of our rates up and down."""
    names = list((found[0]["ours"] | found[0]["baselines"]).keys())
    ours = list(found[0]["ours"])
    columns = ["size", *(f"{name} ms" for name in names), *(f"{name} up, down GB/s" for name in ours)]
    rows = []
    for item in found:
        every = item["ours"] | item["baselines"]
        rates = [f"{item['ours'][name]['up_gb_s']:.2f}, {item['ours'][name]['down_gb_s']:.2f}" for name in ours]
        times = [number(_ms_of(every[name]), "{:,.3g}") for name in names]
        rows.append([f"{item['size_mb']:g} MB", *times, *rates])
    return number_table(columns, rows)


def _ms_of(metric: dict[str, float]) -> float | None:
    """Returns the ms of the whole exchange, the sum of up and down for a baseline without it."""
    if "exchange_ms" in metric:
        return metric["exchange_ms"]
    return metric["up_ms"] + metric["down_ms"] if "up_ms" in metric and "down_ms" in metric else None
