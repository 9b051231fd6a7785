"""The effect of codecs on learning: handwritten digits, four workers in step, in one process.

    python -m paramserver.benchmarks.claims.codecs [--codec NAME]... [--optimizer NAME] [--down [NAME]] [--lose-every N]

The gradients go through what a worker and a server do with them (`worker/transports/encoding.py`, the codec's decoder),
and nothing else of a run does, so that one takes seconds. With --down the weights come back in the same codec, or in
the one that it names, as differences of a reference (`common/codecs/shared/reference.py`), and workers compute on that;
ratios are then of either way. An MLP of 85,002 parameters, batch 32 of each worker; the held-out accuracy after the
last step, of several seeds, with what was left out sent later, and without.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from ...common.codecs.base import Codec, decode_payload, payload_bytes
from ...common.codecs.shared.by_tensor import ByTensor
from ...common.codecs.shared.reference import approach, moves_reference
from ...common.kinds import ContributionKind
from ...common.registry import CODECS
from ...common.tensors.layout import Layout, as_bytes, new_payload
from ...common.tensors.onebit import OneBitAdam
from ...common.tensors.optimizers import apply_hyperparameters, current_hyperparameters
from ...common.wire.frames import payload_frames
from ...worker.tasks.digits import Digits
from ...worker.tensors.transfer import DirectTransfer, ModelTensors
from ...worker.transports.encoding import Encoding

NUM_WORKERS, BATCH = 4, 32
WARM = 0.2  # of a run, of 1-bit Adam
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "onebit": lambda parameters: OneBitAdam(parameters, lr=1e-3, weight_decay=0),
}


class Outcome(NamedTuple):
    accuracy: float
    ratio: float  # bytes of a gradient over those that were sent, with their framing
    ratio_down: float  # the same of weights


class Way:
    """Encodes one worker's gradients or deltas, and decodes them as the server does."""

    def __init__(self, codec: Codec, layout: Layout, kind: ContributionKind = ContributionKind.GRADIENT) -> None:
        self.codec, self._layout, self._kind = codec, layout, kind
        self.encoding = Encoding(codec, layout, len(layout.entries))
        self.num_sent = 0  # bytes of the newest

    def send(self, transfer: DirectTransfer) -> torch.Tensor:
        """Returns the payload that counts, uint8 [exchange_bytes]."""
        payload = self.encode(transfer)
        self.replied(counts=True)
        return payload

    def encode(self, transfer: DirectTransfer, without: frozenset[str] = frozenset()) -> torch.Tensor:
        """uint8 [exchange_bytes], of a contribution without these tensors; what becomes of it is to be said."""
        self.encoding.choose(without)
        (self._stretch,) = transfer.gather(self._kind)
        sent = torch.frombuffer(self.encoding.whole(self._stretch), dtype=torch.uint8)
        payload, self.num_sent = new_payload(self._layout.exchange_bytes), len(sent)
        decode_payload(self.encoding.codec, self._layout, sent, payload)
        return payload

    def replied(self, counts: bool) -> None:
        if counts:
            self.encoding.commit()
        else:
            self.encoding.rollback(self._stretch if self._kind.holds_differences else None)


class Back:
    """Encodes the server's weights, and decodes them as workers do."""

    def __init__(self, codec: Codec, tensors: ModelTensors) -> None:
        self.num_bytes = num_framed(tensors.layout.exchange_bytes)
        self._transfer, self._layout, self._codec = DirectTransfer(tensors), tensors.layout, codec
        self._reference = self._weights()
        if isinstance(codec, ByTensor) and moves_reference(codec):
            self._out = new_payload(payload_bytes(codec, tensors.layout))
            self._encoder = codec.encoder(tensors.layout)
            self.num_bytes = num_framed(len(self._out))

    def _weights(self) -> torch.Tensor:
        payload = torch.cat([torch.frombuffer(piece, dtype=torch.uint8) for piece in self._transfer.gather_all()])
        return payload[: self._layout.exchange_bytes]

    def lend(self) -> torch.Tensor:
        """Put the workers' weights into the model during the block."""
        weights = self._weights()
        if isinstance(self._codec, ByTensor) and moves_reference(self._codec):
            approach(self._codec, self._encoder, weights, self._reference, self._out)
            self._transfer.write(0, as_bytes(self._reference))
        return weights

    def give_back(self, weights: torch.Tensor) -> None:
        self._transfer.write(0, as_bytes(weights))


def num_framed(num_bytes: int) -> int:
    """Returns the bytes of a payload on a stream."""
    return sum(map(len, payload_frames([memoryview(bytes(num_bytes))])))


def run(
    codec: str,
    optimizer: str,
    seed: int,
    num_steps: int,
    has_feedback: bool = True,
    down: str = "raw",
    lose_every: int = 0,
) -> Outcome:
    """Train once. `lose_every`: after so many steps one worker, by turns, loses what it kept back."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    task, tensors = Digits(), ModelTensors(net)
    transfer, layout = DirectTransfer(tensors), tensors.layout
    ways = [Way(codec_of(codec, has_feedback), layout) for _ in range(NUM_WORKERS)]
    server = OPTIMIZERS[optimizer](net.parameters())
    batches = [_batches(task, rank, seed) for rank in range(NUM_WORKERS)]
    back = Back(CODECS.load(down)(), tensors)
    for group in server.param_groups:
        group["warmup_steps"] = round(num_steps * WARM)
    begun = [current_hyperparameters(group) for group in server.param_groups]
    for way in ways:
        way.encoding.of_optimizer(begun)
    for step in range(num_steps):
        weights = back.lend()
        mean = torch.zeros(layout.exchange_bytes // 4)
        for way, batch in zip(ways, batches, strict=True):
            way.encoding.ready(step)
            images, labels = next(batch)
            net.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            mean += way.send(transfer).view(torch.float32) / NUM_WORKERS
        for (_, view), tensor in zip(layout.views(mean.view(torch.uint8)), tensors.tensors, strict=True):
            tensor.grad = view
        back.give_back(weights)
        for group, hyperparameters in zip(server.param_groups, ways[0].encoding.prepared(tuple(begun)), strict=True):
            apply_hyperparameters(group, hyperparameters)
        server.step()
        if lose_every and step % lose_every == lose_every - 1:
            ways[step // lose_every % NUM_WORKERS].encoding.start()
    sent, whole = num_framed(payload_bytes(ways[0].codec, layout)), layout.exchange_bytes
    return Outcome(task.evaluate(net)["accuracy"], whole / sent, whole / back.num_bytes)


def codec_of(name: str, has_feedback: bool) -> Codec:
    codec: Codec = CODECS.load(name)()
    codec.has_feedback = codec.has_feedback and has_feedback
    return codec


def _batches(task: Digits, rank: int, seed: int) -> Iterator[list[torch.Tensor]]:
    images, labels = task.train_data().tensors  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(seed * NUM_WORKERS + rank)
    while True:
        order = torch.randperm(len(images), generator=generator)[rank::NUM_WORKERS]
        for at in range(0, len(order) - BATCH + 1, BATCH):
            yield [images[order[at : at + BATCH]], labels[order[at : at + BATCH]]]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", action="append", choices=CODECS.names())
    parser.add_argument("--optimizer", default="momentum", choices=OPTIMIZERS)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--down", nargs="?", const="", metavar="CODEC", help="both ways; only with what is left out sent later"
    )
    parser.add_argument("--lose-every", type=int, default=0, metavar="N", help="steps, after which a worker loses that")
    parser.add_argument("--only-feedback", action="store_true", help="do not also train without it")
    return parser


def main() -> None:
    args = arguments().parse_args()
    torch.set_num_threads(1)
    print(f"digits, {NUM_WORKERS} workers, {args.optimizer}, {args.steps} steps, {args.seeds} seeds: accuracy in %")
    print(f"{'codec':10}{'ratio':>8}{'down':>8}  {'mean':>6}{'least':>7}{'most':>7}   nothing sent later")
    of_any = [name for name in CODECS.names() if (CODECS.load(name).optimizer is None) != (args.optimizer == "onebit")]
    for codec in args.codec or of_any:
        columns, ratio, ratio_down = [], 1.0, 1.0
        down = "raw" if args.down is None else args.down or codec
        is_alone = args.only_feedback or args.down is not None or not CODECS.load(codec).has_feedback
        for has_feedback in (True,) if is_alone else (True, False):
            how = (args.optimizer, args.steps, has_feedback, down, args.lose_every)
            found = [run(codec, how[0], seed, *how[1:]) for seed in range(args.seeds)]
            every, ratio, ratio_down = [100 * item.accuracy for item in found], found[0].ratio, found[0].ratio_down
            columns.append(f"{statistics.mean(every):6.2f}{min(every):7.2f}{max(every):7.2f}")
        print(f"{codec:10}{ratio:8.2f}{ratio_down:8.2f}  {'   '.join(columns)}", flush=True)


if __name__ == "__main__":
    main()
