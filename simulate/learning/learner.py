"""Real training under the virtual clock: the workers' computing and the server's steps.

The learner uses the gradients, local steps and data of a worker's loop, and the engine's `Folding` and `Store`. It
makes no decisions and reads no clock, so a run has the same events with and without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...common import combinations
from ...common.codecs.base import Codec, FreeBuffers, decode_payload, encode_payload
from ...common.codecs.shared.by_tensor import ByTensor
from ...common.codecs.shared.reference import moves_reference
from ...common.config.schema import Config
from ...common.errors import DivergedError, UsageError, raise_first
from ...common.registry import CODECS
from ...common.reporting.curve import Point
from ...common.tensors import optimizers
from ...common.tensors.layout import Layout, copy_of, new_payload
from ...common.tensors.optimizers import OptimizerSpec
from ...common.user_code import user_code
from ...common.wire.records import COUNTED, Outcome, TrainingInfo
from ...common.wire.segments import private_segment
from ...ps.core import effects, events
from ...ps.engine.folding import Folding, Staged
from ...ps.engine.modes import make_policy
from ...ps.tensors.model import Model
from ...ps.tensors.thread import TensorThread
from ...worker.tasks.base import Task
from ...worker.tensors.local_steps import Anchor
from ...worker.tensors.transfer import DirectTransfer, ModelTensors, Stretch
from ...worker.training.data import Shares, seed_everything, sharded_batches, step_seed
from ...worker.training.tasks.loading import load_task
from ...worker.training.tasks.schedule import rate_at
from ...worker.transports.encoding import Encoding

_MAX_BYTES = 4 << 30  # of all workers together
_NUM_POINTS = 20  # of a curve


class _Inline(TensorThread):
    """Runs tensor work at once: the virtual clock stands still."""

    def size_for(self, num_bytes: int) -> None:
        torch.set_num_threads(1)


class _Machine:
    """A model and its optimizer."""

    def __init__(self, config: Config, task: Task) -> None:
        torch.manual_seed(config.run.seed)
        with user_code():
            self.net: nn.Module = task.model()
        self.net.train()
        groups = [{"params": list(self.net.parameters())}]
        self.optimizer = optimizers.build_optimizer(config.optimizer.name, groups, config.optimizer.arguments())
        self.step = optimizers.plain_step(type(self.optimizer))
        self.tensors = ModelTensors(self.net)
        self.transfer = DirectTransfer(self.tensors)
        self.anchor: Anchor | None = None
        self.holds: torch.Tensor | None = None  # the weights of the last `put`

    def put(self, weights: torch.Tensor) -> None:
        """Copy weights, uint8 [exchange_bytes], into the model."""
        if self.holds is weights:
            return
        with torch.no_grad():
            for tensor, view in zip(self.tensors.tensors, self.tensors.views(weights), strict=False):
                tensor.copy_(view)
        self.holds = weights


@dataclass(slots=True)
class _Rank:
    """The state of one rank."""

    machine: _Machine
    weights: torch.Tensor  # received last
    on_its_way: torch.Tensor  # in a reply
    batches: Iterator[tuple[Any, int]]
    division: tuple[int, int] = (1, 0)
    computed: Staged | None = None
    sent: Staged | None = None  # in transit
    num_samples: int = 0
    hyperparameters: tuple[optimizers.Hyperparameters, ...] | None = None
    version: int = 0  # received last
    up: Up | None = None  # None: contributions are raw


class Learner:
    """The training of one run. Payloads are uint8 [exchange_bytes]. Times are virtual seconds."""

    def __init__(self, config: Config, num_workers: int) -> None:
        """Raises UsageError for settings with which a simulation cannot learn."""
        optimizers.without_compiler()
        policy = make_policy(config)
        self.kind = policy.kind
        _check_possible(config, policy)
        self._config, self._num_workers = config, num_workers
        device = torch.device("cpu")
        self.task: Task = load_task(config.task.name, config.task.args, seed=config.run.seed, device=device)
        with user_code():
            data = self.task.train_data()
        make = getattr(self.task, "sampler", None)
        self._shares = Shares(data, config.run.batch_size, config.run.seed, sampler=make(data) if make else None)
        first = _Machine(config, self.task)
        layout = first.tensors.layout
        self._check_size(layout.exchange_bytes)
        self._shares.num_batches(num_workers)  # raises for too few samples
        self._thread = _Inline(_fail)
        self.model = Model(config, self._thread, policy)
        self._described = optimizers.describe_optimizers([first.optimizer], first.tensors.names)
        combinations.check(combinations.choices_of(config, config.run.mode, optimizers=self._described.each))
        self.model.adopt(layout, self._described)
        begin = private_segment(layout.total_bytes)
        begin.payload.copy_(copy_of(*first.transfer.gather_all()))
        self.model.begin(begin)
        self._folding = Folding(self.model, self._thread, policy)
        self._down = Down(config, self.model)
        self._first = first  # evaluated; all ranks of gradient modes compute on it
        weights = self._down.weights(0, is_start=True)
        self._ranks = [_Rank(first, weights, weights, iter(()), (num_workers, rank)) for rank in range(num_workers)]
        self.curve: list[Point] = []
        self._num_steps = 0
        self.measure(0.0, 0)

    def _check_size(self, num_bytes: int) -> None:
        each = num_bytes * (6 if self.kind.worker_steps else 2)  # weights, gradient, optimizer, anchor, payload
        each += num_bytes * 3 * (self._config.worker.codec != "raw")  # gathered, encoded, what was left out
        if each * self._num_workers > _MAX_BYTES:
            raise UsageError(
                f"flag --learn: {self._num_workers:,} workers of this model hold {each * self._num_workers:,} bytes, "
                f"but the limit is {_MAX_BYTES:,}",
                fix=f"-n {_MAX_BYTES // each}, or without --learn",
            )

    # ---- workers -----------------------------------------------------------------------------

    def compute(self, rank: int, num_steps: int, step: int) -> None:
        """Take training steps, beginning with step `step` of the run. `send` sends their result."""
        item, machine, config = self._ranks[rank], self._ranks[rank].machine, self._config
        if not self.kind.worker_steps:
            machine.put(item.weights)
        item.num_samples = 0
        for at in range(step, step + num_steps):
            batch, weight = next(item.batches)
            item.num_samples += weight
            seed_everything(step_seed(config.run.seed, rank, at))
            for group in machine.optimizer.param_groups:
                group["lr"] = rate_at(at, config.run.steps or 1, config.optimizer.lr, config.train)
            machine.optimizer.zero_grad()
            with user_code():
                self.task.loss(machine.net, batch).backward()
            if self.kind.worker_steps:
                machine.step(machine.optimizer)
        without: frozenset[str] = frozenset()
        if not self.kind.worker_steps:
            groups = [optimizers.current_hyperparameters(group) for group in machine.optimizer.param_groups]
            item.hyperparameters = tuple(groups) if item.up is None else item.up.encoding.prepared(tuple(groups))
            names = [entry.spec.name for entry in machine.tensors.layout.entries]
            without = frozenset(names[index] for index in machine.tensors.without_gradient())
        if machine.anchor is not None:
            machine.anchor.measure()
        (stretch,) = machine.transfer.gather(self.kind)
        payload = copy_of(*stretch.pieces) if item.up is None else item.up.sent(stretch, item.version)
        item.computed = Staged(payload, without)
        floats = [view for view in self._first.tensors.views(payload) if view.is_floating_point()]
        if not all(torch.isfinite(view.float().sum()) for view in floats):
            raise DivergedError(f"rank {rank} computed NaN or Inf in training step {step + 1}", fix="lower --lr")

    def send(self, rank: int) -> tuple[int, TrainingInfo]:
        """Send the result of `compute`, which arrives with its contribution. Returns its samples and facts."""
        item = self._ranks[rank]
        item.sent = item.computed
        return item.num_samples, TrainingInfo(item.hyperparameters or ())

    def arrived(self, event: events.Contributed) -> None:
        """The payload has arrived at the server."""
        sent = self._ranks[event.rank].sent
        assert sent is not None
        self._folding.stage(event.contribution.id, sent)

    def received(self, reply: effects.SendReply) -> None:
        """The reply has arrived at its worker."""
        rank = self._ranks[reply.rank]
        is_start = reply.is_start
        work, start = reply.reply.next_work, reply.reply.start
        rank.division = work.num_workers, work.worker_index
        if is_start:
            first = work.training_steps if start is None else start.num_batches
            rank.batches = sharded_batches(self._shares, lambda: rank.division, first)
        if is_start and self.kind.worker_steps:  # a new process begins with a new optimizer
            rank.machine = _Machine(self._config, self.task)
            rank.machine.anchor = Anchor(rank.machine.tensors) if self.kind.holds_differences else None
        if is_start and (self._config.worker.codec != "raw" or self.kind.holds_differences):
            rank.up = Up(self._config, self._first.tensors.layout, self._described)
        elif rank.up is not None:
            rank.up.replied(reply, is_work=self.kind.holds_differences)
        if reply.has_weights:
            rank.weights, rank.version = rank.on_its_way, reply.reply.result.version
            if self.kind.worker_steps:
                rank.machine.holds = None
                rank.machine.put(rank.weights)
                if rank.machine.anchor is not None:
                    rank.machine.anchor.note()

    # ---- the server --------------------------------------------------------------------------

    def carry_out(self, effect: effects.Effect, now: float, num_steps: int) -> None:
        """Carry out an effect as `ps/engine` does. `num_steps`: of all workers, so far."""
        folding = self._folding
        if isinstance(effect, effects.ContributionTaken):
            folding.taken(effect)
        elif isinstance(effect, effects.Fold):
            folding.fold(effect)
        elif isinstance(effect, effects.Fence):
            folding.fence(effect.rank, effect.incarnation)
        elif isinstance(effect, effects.Commit):
            folding.commit(effect)
            total = self._num_workers * (self._config.run.steps or 1)
            if num_steps * _NUM_POINTS // total > self._num_steps * _NUM_POINTS // total:
                self._num_steps = num_steps
                self.measure(now, num_steps)
        elif isinstance(effect, effects.SendReply) and effect.has_weights:
            weights = self._down.weights(effect.reply.result.version, effect.is_start)
            self._ranks[effect.rank].on_its_way = weights

    def measure(self, now: float, num_steps: int) -> None:
        """Add a point to the curve: the newest weights, evaluated; `step`: mean over the workers."""
        machine, store = self._first, self.model.store
        machine.put(store.weights[: store.layout.exchange_bytes])
        machine.holds = None
        with user_code():
            metrics = {name: float(value) for name, value in self.task.evaluate(machine.net).items()}
        step = num_steps // self._num_workers
        point = Point(version=store.version, step=step, elapsed_s=round(now, 6), metrics=metrics)
        if self.curve and self.curve[-1].version == point.version:
            self.curve.pop()
        self.curve.append(point)


def _check_possible(config: Config, policy: Any) -> None:
    """Raise UsageError for settings with which a simulation would learn differently from a run."""
    worker, trains_on, mode = config.worker, policy.num_in_flight, config.run.mode
    for key, value, plain, why in (
        ("store.max_norm", config.store.max_norm, None, "norms of contributions are not checked"),
        ("train.accumulate", config.train.accumulate, 1, "a training step is one batch"),
        ("train.precision", config.train.precision, "fp32", "computing is float32"),
    ):
        raise_first((value != plain, f"flag --learn: {key} is {value}, and {why}", f"--set {key}={plain}"))
    raise_first(
        (trains_on and worker.codec != "raw",
         f"flag --learn: policy.delayed_update with worker.codec {worker.codec}: a residual reaches the next "
         "contribution in time only where a worker waits", "--set policy.delayed_update=false"),
        (trains_on and policy.kind.worker_steps,
         f"flag --learn: policy.delayed_update in mode {mode} adds local steps to late weights, which is not modelled",
         "--set policy.delayed_update=false"),
    )  # fmt: skip


def _fail(error: BaseException) -> None:
    raise error


# ---- codecs --------------------------------------------------------------------------------------
# Encodes payloads in a codec both ways, as a transport would, with error feedback and the shared reference.
#
# Uploads use the worker's `Encoding`, with the outcome of each contribution. Replies use the server's `References`:
# after a reply a worker has the newest reference, so the sequence of differences does not matter.


class Up:
    """Encodes the contributions of one process. Payloads are uint8 [exchange_bytes]."""

    def __init__(self, config: Config, layout: Layout, optimizer: OptimizerSpec) -> None:
        self._layout = layout
        codec: Codec = CODECS.load(config.worker.codec)()
        self.encoding = Encoding(codec, layout, len(layout.entries))
        self.encoding.of_optimizer([group.hyperparameters for group in optimizer.groups])

    def sent(self, stretch: Stretch, version: int) -> torch.Tensor:
        """Returns the contribution as the server decodes it. `version`: the weights on which it was computed."""
        self.encoding.ready(version)
        self._stretch = stretch
        encoded = torch.frombuffer(self.encoding.whole(stretch), dtype=torch.uint8)
        payload = new_payload(self._layout.exchange_bytes)
        decode_payload(self.encoding.codec, self._layout, encoded, payload)
        return payload

    def replied(self, reply: effects.SendReply, is_work: bool) -> None:
        """Handle the outcome of the newest contribution. `is_work`: the next one includes it if it was dropped."""
        outcome = reply.reply.result.outcome
        if outcome in COUNTED:
            self.encoding.commit()
        else:
            self.encoding.rollback(self._stretch if is_work and outcome is Outcome.DROPPED else None)


class Down:
    """The weights of a run's replies, as workers decode them."""

    def __init__(self, config: Config, model: Model) -> None:
        self._model, self._codec = model, CODECS.load(config.worker.reply_codec)()
        self._kept: tuple[object, torch.Tensor] = None, new_payload(0)  # the newest weights, and what they depend on

    def weights(self, version: int, is_start: bool) -> torch.Tensor:
        """Returns a copy, shared by all workers with the same weights; `version`: the newest."""
        codec, model, reference = self._codec, self._model, None
        is_encoded = not (is_start or codec.is_identity)  # a START is not encoded
        if isinstance(codec, ByTensor) and moves_reference(codec):
            model.references.replies(version, not is_encoded)
            reference = model.references.of(codec, version)
        key = (version, is_encoded) if reference is None else reference.number
        if self._kept[0] == key:
            return self._kept[1]
        if reference is None:
            layout = model.store.layout
            payload = model.store.weights[: layout.exchange_bytes].clone()
            if is_encoded:
                decode_payload(codec, layout, encode_payload(codec, layout, payload, FreeBuffers()), payload)
        else:
            (whole,) = reference.update_from(0).made
            assert whole.payload is not None
            payload = whole.payload
        self._kept = key, payload
        return payload
