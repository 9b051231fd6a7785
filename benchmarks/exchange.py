"""How long one worker's exchange of a large model takes, and what it is made of.

Two runs of the real server, one worker each, that take turns exchange by exchange, so that a noisy
machine disturbs both. The first, in the mode asked for, gives for every exchange
(`optimizer.step()`), on the worker's clock:

    begun -- encode -- sent ------- up, held, reply ------- answered --- down --- done

`held` is the server's own figure (Answer.held_s): from the last byte of the contribution until the
answer is decided, so it holds the check for NaN, the fold and the optimizer. `down` is measured
directly: from the answer's header until the last byte has been written into the parameters. What is
left between sent and answered is the upload and the making of the reply, which only the second run
tells apart: async with `policy.pull_every` so large that no answer carries weights, hence no reply
is made, and

    up = answered - sent - held

is the time from handing over the contribution until the server has all of it (and has decoded it),
plus one small message back (about 0.1 ms). `reply` is what the first run needs beyond that, turn by
turn: small beside the other two, so on a noisy machine trust it least. GB are 10^9 bytes, and for a
codec those it sends.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .results import Report, median
from .server_process import running_server
from .worker_run import JoinedWorker, joined_worker

_NUM_WARMUP = 3
_NEVER = 1_000_000_000


@dataclass(frozen=True)
class ExchangeOptions:
    mb: int
    runs: int
    mode: str
    optimizer: str
    codec: str

    @property
    def num_floats(self) -> int:
        return self.mb * 1_000_000 // 4


@dataclass(frozen=True)
class _Sample:
    """One exchange; seconds."""

    total_s: float
    encode_s: float
    upload_s: float  # sent to answered without held: the upload, and the reply where there is one
    held_s: float
    down_s: float


class _Samples(list[_Sample]):
    """Of one run, in the order of the turns."""

    def all(self, name: str) -> list[float]:
        return [getattr(sample, name) for sample in self]


def measure_exchange(options: ExchangeOptions) -> Report:
    """Both runs, in turns."""
    whole, upload = _Samples(), _Samples()
    steps = str(_NUM_WARMUP + options.runs + 1)
    size = (options.num_floats, options.optimizer, options.codec)
    with (
        running_server("--mode", options.mode, "--workers", "1", "--steps", steps, "--local-steps", "1") as both_ways,
        running_server(
            "--mode", "async", "--workers", "1", "--steps", steps, "--set", f"policy.pull_every={_NEVER}"
        ) as one_way,
        joined_worker(both_ways.address, 0, *size) as first,
        joined_worker(one_way.address, 0, *size) as second,
    ):
        for turn in range(_NUM_WARMUP + options.runs):
            samples = _exchange(first), _exchange(second)
            if turn >= _NUM_WARMUP:
                whole.append(samples[0])
                upload.append(samples[1])
        results = _results(whole, upload, first.body_bytes, first.sent_bytes)
    return Report(
        what="exchange",
        config={**vars(options), "num_floats": options.num_floats, "workers": 1, "warmup": _NUM_WARMUP},
        results=results,
        table=_table(options, results),
    )


def _exchange(worker: JoinedWorker) -> _Sample:
    began = time.perf_counter()
    worker.optimizer.step()
    total_s = time.perf_counter() - began
    at = worker.moments
    return _Sample(
        total_s=total_s,
        encode_s=at.sent - at.begun,
        upload_s=at.answered - at.sent - at.held_s,
        held_s=at.held_s,
        down_s=at.done - at.answered,
    )


def _results(whole: _Samples, upload: _Samples, body_bytes: int, sent_bytes: int) -> dict[str, float]:
    """Times in ms and rates in GB/s, median and best of each."""
    times = {
        "total": whole.all("total_s"),
        "encode": whole.all("encode_s"),
        "up": upload.all("upload_s"),
        "held": whole.all("held_s"),
        "down": whole.all("down_s"),
    }
    beyond = [a - b for a, b in zip(whole.all("upload_s"), upload.all("upload_s"), strict=True)]
    results = {"size_mb": body_bytes / 1e6, "sent_mb": sent_bytes / 1e6, "reply_ms": max(0.0, median(beyond)) * 1e3}
    for name, values in times.items():
        results |= {f"{name}_ms": median(values) * 1e3, f"{name}_best_ms": min(values) * 1e3}
    for name, num_bytes in (("up", sent_bytes), ("down", body_bytes)):
        results[f"{name}_gb_s"] = num_bytes / median(times[name]) / 1e9
        results[f"{name}_best_gb_s"] = num_bytes / min(times[name]) / 1e9
    return results


def _table(options: ExchangeOptions, found: dict[str, float]) -> RenderableType:
    title = f"{found['size_mb']:,.0f} MB float32, {options.mode}, {options.optimizer}, codec {options.codec}"
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("part")
    for name in ("median", "best", "median rate", "best rate"):
        table.add_column(name, justify="right")
    table.add_column("from, to")
    rows = [
        ("encode", "gradients gathered, and encoded by a codec other than raw"),
        ("up", "contribution handed over, server has all of it"),
        ("held", "check for NaN, fold, optimizer"),
        ("reply", "weights encoded on the server"),
        ("down", "answer's header, last byte in the parameters"),
    ]
    for name, meaning in rows:
        figures = [(f"{name}_ms", "{:.1f} ms"), (f"{name}_best_ms", "{:.1f} ms")]
        figures += [(f"{name}_gb_s", "{:.2f} GB/s"), (f"{name}_best_gb_s", "{:.2f} GB/s")]
        table.add_row(name, *(form.format(found[key]) if key in found else "" for key, form in figures), meaning)
    total, best = f"{found['total_ms']:.1f} ms", f"{found['total_best_ms']:.1f} ms"
    table.add_row("exchange", total, best, "", "", "optimizer.step()", style="bold")
    return Group(Text(f"{title}; {options.runs} runs", style="bold"), table)
