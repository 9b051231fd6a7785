"""`worker.codec=auto`: measures the link, the codecs and the training loop. `rule.py` chooses a codec from the figures.

It measures contributions. The time on the way up is from the first byte until the server's reply, minus the time that
the server held the reply back. The time on the way down is from the reply until the weights are complete. Transfers
that overlap with computing tell nothing about the link, so nothing is sent early during a measurement.
"""

from __future__ import annotations

import math
import time
import timeit
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from statistics import median
from typing import NamedTuple

import torch

from ....common.codecs.base import payload_bytes
from ....common.errors import UsageError
from ....common.registry import CODECS
from ....common.reporting.log import get_logger
from ....common.tensors.layout import Kind, Layout, TensorSpec, as_bytes, new_payload
from ...tensors.transfer import Stretch
from ..encoding import Encoding
from .rule import MIN_GAIN, ORDER, WANTED, Choice, Cost, Measured, choose

log = get_logger()

EVERY = 100  # contributions from one measurement to the next
_NUM_MEASURED = 4
_NUM_SKIPPED = 1  # at first, because memory is touched for the first time
_SAMPLE_BYTES = 2 << 20  # of parameters, to measure how long encoding takes
_TIMES = 3
_LONG_S = 0.1  # on a busy machine one sample is enough


class Passed(NamedTuple):
    """The exchange of one contribution with one shard. Bytes are as encoded."""

    up_bytes: int
    up_s: float  # until the reply arrived, minus the server's gate wait
    came_bytes: int  # of the weights, in the same message as the reply
    down_bytes: int  # of the weights, after the reply
    down_s: float


class Seen(NamedTuple):
    """One measured contribution, over all shards."""

    up_bytes: int
    up_s: float
    down_bytes: int
    down_s: float
    compute_s: float


class Auto:
    """The automatic choice of one worker.

    `candidates` are the allowed codecs; `codec` is that of the next contribution.
    """

    def __init__(self, reply_codec: str, max_mbit: float | None) -> None:
        self.candidates: tuple[str, ...] = ("raw",)
        self._chosen = ""  # empty: nothing was chosen yet
        self._may_encode = False
        self._reply_codec = reply_codec
        self._most = max_mbit * 1e6 / 8 if max_mbit else math.inf  # bytes per second
        self._seen: list[Seen] = []
        self._num_to_skip, self._num_until_next = _NUM_SKIPPED, 0

    def meet(self, layout: Layout, round_trip_s: float, is_delayed: bool) -> None:
        """Set the model and other facts that stay the same during the run."""
        self._layout, self._round_trip_s, self._is_delayed = layout, round_trip_s, is_delayed
        self._cost = cache(partial(cost_of, layout=layout))

    def joined(self, carries_codecs: bool, is_here: bool) -> None:
        """Called for new streams. Decides whether a codec can help at all.

        Shared memory takes only raw payloads, and it is the fastest way. A server at a loopback address of this host
        (`is_here`) costs processor time, which a codec would increase, unless `worker.max_mbit` limits the link.
        """
        if not carries_codecs:
            log.info("auto_codec", codec="raw", reason="the server's memory is shared: nothing is sent")
        elif is_here and math.isinf(self._most):
            log.info("auto_codec", codec="raw", reason="the server is on this host: a codec would only cost time")
        self._may_encode = carries_codecs and not (is_here and math.isinf(self._most))
        self._seen = []

    @property
    def codec(self) -> str:
        return self._chosen if self._chosen and self._may_encode else "raw"

    @property
    def measures(self) -> bool:
        """Whether the next contribution is measured.

        It must be sent as a whole, and the worker must wait for the weights.
        """
        return self._may_encode and len(self.candidates) > 1 and self._num_until_next <= 0

    def counted(self, passed: Sequence[Passed], compute_s: float, local_steps: int, step: int) -> None:
        """Count a contribution, and choose a codec when there are enough measurements.

        `passed`: the exchange with each shard; empty after several attempts. `step`: this worker's training steps.
        """
        if not self.measures:
            self._num_until_next -= 1
            return
        if not passed:
            return
        if self._num_to_skip:
            self._num_to_skip -= 1
            return
        self._seen.append(self._together(passed, compute_s))
        if len(self._seen) < _NUM_MEASURED:
            return
        measured = self._measured(max(1, local_steps))
        found = choose(measured, self.costs, self._cost(self._reply_codec), self._chosen or None)
        if found.codec != self._chosen:
            self._say(step, measured, found)
        self._chosen, self._seen, self._num_until_next = found.codec, [], EVERY

    def _together(self, passed: Sequence[Passed], compute_s: float) -> Seen:
        """Combine the shards' figures. Shards work in parallel. Bytes that came with the reply took time before it."""
        up_s, down_s = max(item.up_s for item in passed), max(item.down_s for item in passed)
        up = sum(item.up_bytes for item in passed)
        came, after = sum(item.came_bytes for item in passed), sum(item.down_bytes for item in passed)
        of_came_s = max(0.0, up_s - self._round_trip_s) * came / (up + came)
        return Seen(up, up_s - of_came_s, came + after, down_s + of_came_s, compute_s)

    @property
    def costs(self) -> dict[str, Cost]:
        return {name: self._cost(name) for name in ORDER if name in self.candidates}

    def _measured(self, local_steps: int) -> Measured:
        up, down = self._cost(self.codec), self._cost(self._reply_codec)
        num_bytes, trip_s = self._layout.exchange_bytes, self._round_trip_s

        def bandwidth(samples: list[tuple[int, float]], codec_s: float) -> float:
            seconds = median(seconds for _, seconds in samples) - codec_s
            return min(self._most, median(num for num, _ in samples) / seconds if seconds > 0 else math.inf)

        of_codec_s = num_bytes * (1 / up.encode + 1 / up.decode)
        ups = bandwidth([(item.up_bytes, item.up_s) for item in self._seen], of_codec_s + trip_s)
        replied = [(item.down_bytes, item.down_s) for item in self._seen if item.down_bytes]
        downs = bandwidth(replied, num_bytes / down.decode) if replied else math.inf
        compute_s = median(item.compute_s for item in self._seen)
        return Measured(num_bytes, ups, downs, compute_s, trip_s, local_steps, self._is_delayed)

    def _say(self, step: int, measured: Measured, found: Choice) -> None:
        predicted = ", ".join(f"{name} {1 / period_s:.4g}/s" for name, period_s in found.periods.items())
        pays = ", ".join(f"{name} {_mbit(cost.pays_below)}" for name, cost in self.costs.items() if name != "raw")
        speeds = ", ".join(
            f"{name} {cost.encode / 1e9:.2g}, {cost.decode / 1e9:.2g} GB/s"
            for name, cost in self.costs.items()
            if name != "raw"
        )
        log.info(
            "auto_codec",
            codec=found.codec,
            step=step,
            up=_mbit(measured.up),
            down=_mbit(measured.down),
            round_trip_ms=round(measured.round_trip_s * 1e3, 2),
            compute_ms=round(measured.compute_s * 1e3, 2),
            predicted=predicted,
            pays_below=pays,
            encodes_decodes=speeds,
            advice=self._advice(measured, found),
        )

    def _advice(self, measured: Measured, found: Choice) -> str:
        """Advice on settings that the choice cannot change; empty if the choice reaches the target."""
        advice = []
        costs = self.costs
        if self._reply_codec == "raw" and found.diloco is not None and "q4" in costs:
            period_s = measured.period_s(costs[found.codec], costs["q4"])
            if MIN_GAIN * period_s <= found.periods[found.codec]:
                advice.append(f"worker.reply_codec=q4 makes it {1 / period_s:.4g}/s")
        if found.diloco is not None:
            name, local_steps = found.diloco
            ways = f"worker.codec and worker.reply_codec {name}"
            advice.append(
                f"for {WANTED:.0%} of the time computing use --mode diloco, {ways}, policy.local_steps {local_steps}"
            )
        return "; ".join(advice)


def suits(check: Callable[[], None]) -> bool:
    """Whether a codec passes this check."""
    try:
        check()
    except UsageError:
        return False
    return True


def _mbit(bandwidth: float) -> str:
    if math.isinf(bandwidth):
        return "any"
    mbit = bandwidth * 8e-6
    return f"{mbit:,.0f} Mbit/s" if mbit >= 10 else f"{mbit:.2g} Mbit/s"


def round_trip_s(ask: Callable[[], object]) -> float:
    """The shortest of a few round trips, in seconds."""
    return min(timeit.repeat(ask, number=1, repeat=_TIMES))


def cost_of(name: str, layout: Layout) -> Cost:
    """Measure a codec on tensors of the model's sizes. The server's machine is assumed to be as fast as this one."""
    codec = CODECS.load(name)()
    if codec.is_identity:
        return Cost()
    part = Layout(_some(layout))
    encoding, payload = Encoding(codec, part, len(part.entries)), new_payload(part.exchange_bytes)
    generator = torch.Generator().manual_seed(0)  # leaves the script's generator alone
    for run in part.runs_of(Kind.PARAMETER):
        run.view(payload).normal_(0, 1e-3, generator=generator)
    stretch = Stretch(0, [as_bytes(payload)])
    decoder, decoded = codec.decoder(part), new_payload(part.exchange_bytes)
    encode_s = decode_s = math.inf
    for _ in range(_TIMES):
        began = time.perf_counter()
        sent = torch.frombuffer(encoding.whole(stretch), dtype=torch.uint8)
        encoded = time.perf_counter()
        decoder.begin(sent[: codec.encoded_bytes(part)], decoded)
        decode_s = min(decode_s, time.perf_counter() - encoded)
        encode_s = min(encode_s, encoded - began)
        encoding.commit()
        if time.perf_counter() - began > _LONG_S:
            break
    ratio = layout.exchange_bytes / payload_bytes(codec, layout)
    return Cost(ratio, part.exchange_bytes / encode_s, part.exchange_bytes / decode_s)


def _some(layout: Layout) -> Iterable[TensorSpec]:
    """The model's parameters up to _SAMPLE_BYTES. A larger parameter is cut to that size."""
    num_bytes = 0
    for entry in layout.entries:
        spec = entry.spec
        if spec.kind is Kind.PARAMETER and num_bytes < _SAMPLE_BYTES:
            if spec.num_bytes > _SAMPLE_BYTES:
                shape = (1024, _SAMPLE_BYTES // 4096) if len(spec.shape) > 1 else (_SAMPLE_BYTES // 4,)
                spec = TensorSpec(spec.name, spec.kind, spec.dtype, shape)
            num_bytes += spec.num_bytes
            yield spec
