"""Measures a codec's speed on one core, and up to which link speed it pays.

A model of matrices of 4 MB, normal values. `kept` is what a worker does with a contribution: it is gathered, what was
left out before added, encoded, and what is left out now kept (`worker/transports/encoding.py`). Seconds are the
thread's own, so that other work on the machine costs less of the metric; the best of the turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ....common.codecs.base import Codec, payload_bytes
from ....common.registry import CODECS
from ....common.tensors.layout import Kind, Layout, TensorSpec, as_bytes, new_payload
from ....worker.tensors.transfer import Stretch
from ....worker.transports.encoding import Encoding
from ...output.report import Report
from ...output.tables import number, number_table, page

_ROWS, _COLUMNS = 1000, 1000


@dataclass(frozen=True)
class CodecOptions:
    codecs: list[str]
    mb: int
    runs: int


def measure_codecs(options: CodecOptions) -> Report:
    """Measure GB of float32 per second for each codec."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = {name: _measure(CODECS.load(name)(), options) for name in options.codecs}
    finally:
        torch.set_num_threads(num_threads)
    columns = ["GB/s of float32, one core", "ratio", "encode", "decode", "kept", "pays below Gbit/s"]
    rows = [
        [
            name,
            number(result["ratio"], "{:,.2f}"),
            *(number(result.get(key), "{:,.2f}") for key in _RATES),
            _pays(result),
        ]
        for name, result in results.items()
    ]
    title = f"{options.mb} MB, best of {options.runs}"
    return Report("codecs", vars(options), results, page(title, number_table(columns, rows)))


_RATES = ("encode_gb_s", "decode_gb_s", "kept_gb_s")


def _measure(codec: Codec, options: CodecOptions) -> dict[str, float]:
    specs = [TensorSpec(f"w{i}", Kind.PARAMETER, "float32", (_ROWS, _COLUMNS)) for i in range(max(1, options.mb // 4))]
    layout = Layout(specs)
    payload, back = torch.randn(layout.num_parameters).view(torch.uint8), new_payload(layout.exchange_bytes)
    encoded = torch.zeros(codec.encoded_bytes(layout), dtype=torch.uint8)
    encoder = codec.encoder(layout)
    encoding = Encoding(codec, layout, len(layout.entries))
    stretch = Stretch(0, [as_bytes(payload)])

    def contribute() -> None:
        encoding.whole(stretch)
        encoding.commit()

    parts: dict[str, Callable[[], object]] = {
        "encode": lambda: encoder.begin(payload, encoded),
        "decode": lambda: codec.decode(layout, encoded, back),
        "kept": contribute,
    }
    rates = {f"{name}_gb_s": layout.parameter_bytes / _best(part, options.runs) / 1e9 for name, part in parts.items()}
    return {"ratio": layout.parameter_bytes / payload_bytes(codec, layout), **rates}


def _best(part: Callable[[], object], runs: int) -> float:
    """Returns the best seconds, after one unmeasured turn."""
    part()
    found = []
    for _ in range(runs):
        begun = time.thread_time()
        part()
        found.append(time.thread_time() - begun)
    return min(found)


def _pays(item: dict[str, float]) -> str:
    """Returns (1 - 1/ratio) / (1/E + 1/D) for one worker."""
    spared = 1 - 1 / item["ratio"]
    return f"{8 * spared / (1 / item['encode_gb_s'] + 1 / item['decode_gb_s']):,.1f}" if spared > 0 else "-"
