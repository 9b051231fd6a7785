"""The effect of local steps, outer optimizers, codecs and lateness on learning: four workers in one process.

    python -m paramserver.benchmarks.claims.outer [--task gpt|digits] [--steps N] [--seeds N] [--way NAME]...

Time is counted, not waited for: a worker takes its local steps in so many seconds each, an exchange takes none. The
mode's own policy decides and the server's own store steps; deltas go through what a worker and a server do with them
(`codecs.py`). tau: a reply, which is here at once, is merged after so many local steps. `sync` is plain torch on the
mean gradient. `gpt` is a byte-level transformer of 0.13 million parameters, `digits` an MLP of 85,002; AdamW with a
cosine schedule in the workers. Held-out loss after so many steps of each.
"""

from __future__ import annotations

import argparse
import heapq
import math
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ...common.codecs.base import payload_bytes
from ...common.codecs.shared.by_tensor import ByTensor, PieceEncoder, only_rest
from ...common.codecs.shared.reference import approach, moves_reference
from ...common.kinds import ContributionKind
from ...common.registry import CODECS
from ...common.tensors.layout import new_payload
from ...common.wire.records import Base, Contribution, ContributionId, Counts
from ...ps.engine.modes import policy_of
from ...ps.policies.base import Commit, Discard, Fold, Outcome, Reply
from ...ps.tensors.model import outer_spec
from ...ps.tensors.store import Step, Store
from ...worker.tasks.base import Task
from ...worker.tasks.digits import Digits
from ...worker.tasks.gpt import Gpt
from ...worker.tensors.local_steps import Anchor, Overlap
from ...worker.tensors.transfer import DirectTransfer, ModelTensors
from .codecs import Way, codec_of, num_framed

NUM_WORKERS = 4
SAME, UNEQUAL = (1.0,) * NUM_WORKERS, (1.0, 1.0, 2.0, 4.0)  # seconds of a local step, by rank


class Asked(NamedTuple):
    """One way of training. `options` are the mode's; `dropped`: share of deltas that never come."""

    mode: str = "diloco"
    is_plain: bool = False  # torch alone, on the mean gradient of every step
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody writes to it
    up: str = "raw"
    down: str = "raw"
    has_feedback: bool = True
    seconds: tuple[float, ...] = SAME
    dropped: float = 0.0


_MEAN = {"outer_lr": 1.0, "outer_momentum": 0.0}
WAYS: dict[str, Asked] = {
    "sync": Asked(is_plain=True),
    "H 25": Asked(),
    "H 25, q4 both": Asked(up="q4", down="q4"),
    "H 25, int8 both": Asked(up="int8", down="int8"),
    "H 25, q2 both": Asked(up="q2", down="q2"),
    "H 25, q2 both, no feedback": Asked(up="q2", down="q2", has_feedback=False),
    "H 25, mean": Asked(options=_MEAN),
    "H 25, 0.7/0.9": Asked(options={"outer_momentum": 0.9}),
    "H 25, 5 fragments": Asked(options={"fragments": 5}),
    **{
        f"H 25, 5 fragments, tau 2{codecs}": Asked(
            options={"fragments": 5, "delayed_update": True, "overlap_steps": 2}, up=codec, down=codec
        )
        for codecs, codec in (("", "raw"), (", q4 both", "q4"))
    },
    "H 10": Asked(options={"local_steps": 10}),
    "H 10, mean": Asked(options={"local_steps": 10, **_MEAN}),
    "H 100": Asked(options={"local_steps": 100}),
    "H 100, mean": Asked(options={"local_steps": 100, **_MEAN}),
    "H 100, q4 both": Asked(options={"local_steps": 100}, up="q4", down="q4"),
    "H 25, sparse up": Asked(options=_MEAN, up="sparse"),
    "H 25, sparse up, no feedback": Asked(options=_MEAN, up="sparse", has_feedback=False),
    "H 25, 30 % dropped": Asked(dropped=0.3),
    "unequal": Asked(seconds=UNEQUAL),
}


class Found(NamedTuple):
    loss: float
    seconds: float  # of counted time
    up: float  # bytes of a gradient at every step over those that were sent up; 0: not counted
    down: float


class Worker:
    """One machine: its model, its own optimizer, the way of its deltas to the server."""

    def __init__(self, asked: Asked, task: Task, rank: int, seed: int, num_steps: int) -> None:
        torch.manual_seed(seed)
        self.net = _net(task)
        self._task, self._num_steps = task, num_steps
        self.tensors = ModelTensors(self.net)
        self._num_fragments = num = asked.options.get("fragments", 1)
        self._overlap, self._overlap_steps = None, asked.options.get("overlap_steps", 0)
        self._is_delayed = bool(asked.options.get("delayed_update"))
        if self._is_delayed or num > 1:
            self._overlap = Overlap(self.tensors, num)
        self._anchor = self._overlap or Anchor(self.tensors)
        self.transfer = DirectTransfer(self.tensors)
        self._received: list[torch.Tensor] = []  # and not merged
        self._since = 0  # local steps since then
        self.without: frozenset[str] = frozenset()
        self.way = Way(codec_of(asked.up, asked.has_feedback), self.tensors.layout, ContributionKind.DELTA)
        self._optimizer = torch.optim.AdamW(self.net.parameters(), lr=rate(task, 0, num_steps))
        self._batches = _batches(task, rank, seed)
        self.taken = self.version = self.number = 0
        self.to_take, self.began_at = 0, 0.0
        self.payload: torch.Tensor | None = None  # its delta, decoded

    @property
    def num_left_out(self) -> int:
        """Returns the bytes of other fragments, which are zeros or unchanged."""
        if not self.way.codec.is_identity:
            return 0  # they are not there
        return sum(entry.num_bytes for entry in self.tensors.layout.entries if entry.spec.name in self.without)

    def step(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate(self._task, self.taken, self._num_steps)
        self.gradient()
        self._optimizer.step()
        self.taken += 1
        self._since += 1
        if self._overlap is not None and self._since == self._overlap_steps:
            self._merge_received()

    def gradient(self) -> None:
        self.net.zero_grad()
        self._task.loss(self.net, next(self._batches)).backward()

    def measure(self) -> None:
        self._merge_received()
        if self._overlap is not None:
            chosen = None if self.taken == self._num_steps else self.version % self._num_fragments
            specs = self.tensors.layout.specs
            self.without = frozenset(specs[index].name for index in self._overlap.choose(chosen))
        self._anchor.measure()
        self.payload = self.way.encode(self.transfer, self.without)
        if self._overlap is not None:
            self._overlap.depart()
        self.number += 1

    def receive(self, weights: torch.Tensor, version: int) -> None:
        received = [view for _, view in self.tensors.layout.views(weights)]
        if self._overlap is not None and version:
            self._received, self._since, self.version = [view.clone() for view in received], 0, version
            if not self._is_delayed:
                self._merge_received()
            return
        self.show(received)
        self._anchor.note()
        self.version = version

    def show(self, weights: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for view, tensor in zip(weights, self.tensors.tensors, strict=True):
                tensor.copy_(view)

    def _merge_received(self) -> None:
        if self._overlap is not None and self._received:
            self._overlap.merge(self._received)
            self._received = []


class Run:
    """Workers, a policy and a store under one clock."""

    def __init__(self, asked: Asked, task: Task, seed: int, num_steps: int) -> None:
        self._asked, self._chance = asked, torch.Generator().manual_seed(seed)
        self.workers = [Worker(asked, task, rank, seed, num_steps) for rank in range(NUM_WORKERS)]
        settings = {"training_steps": num_steps, "num_workers": NUM_WORKERS, **asked.options}
        self.policy = policy_of(asked.mode, settings)
        first = self.workers[0]
        self._layout = layout = first.tensors.layout
        weights = torch.cat([torch.frombuffer(piece, dtype=torch.uint8) for piece in first.transfer.gather_all()])
        outer = self.policy.outer
        assert outer is not None
        self.store = Store(layout, weights.clone(), outer_spec(outer.name, outer.arguments, layout))
        self._down = CODECS.load(asked.down)()
        self._reference = weights[: layout.exchange_bytes].clone()  # what workers are given
        self._out = new_payload(payload_bytes(self._down, layout))
        self._encoder = self._down.encoder(layout)
        self.sent = self.received = 0  # bytes of payloads, framed
        self.now = 0.0
        self._due: list[tuple[float, int]] = []  # when somebody's steps are taken

    def run(self) -> None:
        for rank in range(NUM_WORKERS):
            self._carry_out(self.policy.joined(rank, 0.0))
        while self._due:
            self.now, rank = heapq.heappop(self._due)
            if rank < 0:
                self._carry_out(self.policy.tick(self.now))
                continue
            worker = self.workers[rank]
            for _ in range(worker.to_take):
                worker.step()
            worker.measure()
            self.sent += num_framed(worker.way.num_sent - worker.num_left_out)
            counts = Counts(worker.to_take, worker.to_take, worker.to_take)
            contribution = Contribution(
                ContributionId(rank, 1, worker.number), counts=counts, base=Base(worker.version)
            )
            self._carry_out(self.policy.contributed(rank, contribution, self.now))

    def _carry_out(self, decisions: list[Any]) -> None:
        for decision in decisions:
            if isinstance(decision, Fold):
                worker = self.workers[decision.rank]
                assert worker.payload is not None
                weight = decision.weight
                if self._asked.dropped and torch.rand((), generator=self._chance).item() < self._asked.dropped:
                    weight *= 1e-6  # its work is lost, and counts in no mean with others
                self.store.fold(worker.payload, weight, decision.rank, without=worker.without)
            elif isinstance(decision, Discard):
                self.workers[decision.rank].payload = None
            elif isinstance(decision, Commit):
                self._commit(decision)
            elif isinstance(decision, Reply):
                self._reply(decision)

    def _commit(self, commit: Commit) -> None:
        outer = self.policy.outer
        assert outer is not None
        self.store.commit(Step(NUM_WORKERS, 0, [dict(outer.arguments)], lr_scale=commit.lr_scale))
        if isinstance(self._down, ByTensor) and moves_reference(self._down):
            assert isinstance(self._encoder, PieceEncoder)
            down = only_rest(self._down, self._without())
            self._out = new_payload(payload_bytes(down, self._layout))
            approach(down, self._encoder, self.store.weights, self._reference, self._out)
        else:
            self._reference.copy_(self.store.weights[: len(self._reference)])

    def _without(self) -> frozenset[str]:
        """Returns the names that no worker has contributed to the newest version."""
        return frozenset.intersection(*(worker.without for worker in self.workers))

    def _reply(self, reply: Reply) -> None:
        worker = self.workers[reply.rank]
        if reply.outcome is not Outcome.START:
            worker.way.replied(reply.outcome is Outcome.APPLIED)
        if reply.outcome is Outcome.DROPPED:
            worker.number -= 1
        # One difference for each version since; a joiner's whole reference is not counted.
        self.received += num_framed(len(self._out) - worker.num_left_out) * (self.policy.version - worker.version)
        worker.receive(self._reference, self.policy.version)
        worker.to_take = self.policy.next_local_steps(reply.rank)
        if worker.to_take:
            at = self.now + worker.to_take * self._asked.seconds[reply.rank]
            heapq.heappush(self._due, (at, reply.rank))
            for tenth in range(1, 10):  # the engine's ticks
                heapq.heappush(self._due, (self.now + (at - self.now) * tenth / 10, -1))


def run(way: str, task: Task, seed: int, num_steps: int) -> Found:
    """Train once."""
    asked = WAYS[way]
    if asked.is_plain:
        return _sync(asked, task, seed, num_steps)
    item = Run(asked, task, seed, num_steps)
    item.run()
    net = item.workers[0]
    net.show([view for _, view in net.tensors.layout.views(item.store.weights)])
    raw = NUM_WORKERS * num_steps * net.tensors.layout.exchange_bytes
    return Found(task.evaluate(net.net)["loss"], item.now, raw / item.sent, raw / item.received)


def _sync(asked: Asked, task: Task, seed: int, num_steps: int) -> Found:
    """One AdamW on the mean gradient of all."""
    workers = [Worker(asked, task, rank, seed, num_steps) for rank in range(NUM_WORKERS)]
    for worker in workers[1:]:
        worker.net = workers[0].net
    net = workers[0].net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = rate(task, step, num_steps)
        mean = [torch.zeros_like(parameter) for parameter in net.parameters()]
        for worker in workers:
            worker.gradient()
            for total, parameter in zip(mean, net.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad / NUM_WORKERS
        for total, parameter in zip(mean, net.parameters(), strict=True):
            parameter.grad = total
        optimizer.step()
    return Found(task.evaluate(net)["loss"], num_steps * max(asked.seconds), 1.0, 1.0)


def _net(task: Task) -> nn.Module:
    if not isinstance(task, Digits):
        return task.model()
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def rate(task: Task, step: int, num_steps: int) -> float:
    """Learning rate of a local step."""
    most = 2e-3 if isinstance(task, Digits) else 3e-3
    return most * 0.5 * (1 + math.cos(math.pi * step / num_steps))


def _batches(task: Task, rank: int, seed: int) -> Iterator[list[torch.Tensor]]:
    tensors = task.train_data().tensors  # type: ignore[attr-defined]
    size = 32 if isinstance(task, Digits) else 16
    generator = torch.Generator().manual_seed(seed * NUM_WORKERS + rank)
    while True:
        order = torch.randperm(len(tensors[0]), generator=generator)[rank::NUM_WORKERS]
        for at in range(0, len(order) - size + 1, size):
            yield [tensor[order[at : at + size]] for tensor in tensors]


def make_task(name: str) -> Task:
    return Digits() if name == "digits" else Gpt(context=48, num_layers=2, width=64)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("gpt", "digits"), default="gpt")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--way", action="append", choices=WAYS)
    return parser


def main() -> None:
    options = arguments().parse_args()
    torch.set_num_threads(1)
    task = make_task(options.task)
    print(f"{options.task}, {NUM_WORKERS} workers, {options.steps} steps, {options.seeds} seeds: held-out loss")
    print(f"{'':40}{'mean':>9}{'least':>9}{'most':>9}{'to first':>10}{'up':>9}{'down':>9}{'seconds':>9}")
    first: float | None = None
    for way in options.way or WAYS:
        found = [run(way, task, seed, options.steps) for seed in range(options.seeds)]
        losses = [item.loss for item in found]
        mean = statistics.mean(losses)
        first = first or mean
        print(
            f"{way:40}{mean:9.4f}{min(losses):9.4f}{max(losses):9.4f}{mean / first - 1:+10.1%}"
            f"{found[0].up:9.1f}{found[0].down:9.1f}{found[0].seconds:9.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
