"""Strategy of a replica group, a worker of several processes.

    backward | mean over the processes | group rank 0: its strategy -> progress and weights -> all | next batch

The processes average their gradients. Group rank 0 exchanges the mean with the server in the run's mode, and sends the
result to the others. All processes run the same loop, so all call each method in the same order, which `_meet` checks.
If workers run the optimizer (localsgd, diloco), each process steps along the mean, so all weights stay equal.
"""

from __future__ import annotations

import math
import os
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...common.combinations import WITHIN_WORKER
from ...common.config.schema import Config
from ...common.errors import MismatchError, ParamServerError, UsageError
from ...common.security import read_token
from ...common.tensors.layout import Kind
from ...common.tensors.optimizers import OptimizerSpec, is_elementwise
from ...common.wire.records import Position
from ..conversation.exchange import Exchange
from ..conversation.messages import Begun, Final, Goodbye, Outgoing, settings_from
from ..session import Progress
from ..strategies.all_reduce import AllReduceStrategy
from ..strategies.base import Strategy, check_takes_dense, divided_tensor
from ..tensors.transfer import ModelTensors, is_divided
from ..training.pipeline import Example, LossFn, Pipeline
from .batch_norm import synchronize
from .group import WATCH_S, Group, find_member
from .member import ProgressLink, joint_norm, no_optimizer_here

if TYPE_CHECKING:
    from ...common.config.sections.processes import WorkerConfig
    from .member import Local, Sharded
    from .pipeline import StagedPipeline

_STEP = 0xFFFFFFFF  # mask for the step in a position of `_meet`; the other bits count starts
# Settings that may differ between the processes of one worker.
_OWN = ("worker.local_rank", "worker.device", "worker.threads", "output.", "log.", "slowdown.", "launch.", "server.")
_POINTS = ("session.optimizer()", "step()", "the end of its loop")
_REASON_BYTES = 500


def join(config: Config) -> Group:
    """Form the group with the other processes of this worker.

    Raises ParamServerError, which names missing processes and different settings.
    """
    sections = config.model_dump(mode="json")
    settings = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    shared = {key: value for key, value in settings.items() if not key.startswith(_OWN)}
    token, trusts_network = read_token(config.security), config.server.insecure
    member, device = find_member(os.environ), chosen_device(config.worker)
    return Group(member, device, shared, config.worker.give_up_s, token, trusts_network)


def chosen_device(worker: WorkerConfig) -> str:
    """Returns the device of this process."""
    device = worker.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = f"cuda:{(worker.local_rank or 0) % torch.cuda.device_count()}"
    return device


class Grouped(Strategy):
    """Group rank 0 has a strategy with the server, the others have none.

    With a sharded model each has one for its part.
    """

    may_skip = False

    def __init__(self, group: Group, open_exchange: Callable[[], tuple[Exchange, Strategy]], config: Config) -> None:
        """Open the exchange in group rank 0.

        An error there is raised in all processes.
        """
        self._group, self._config = group, config
        self._sharded: Sharded | None = None  # set if the model is sharded
        self._stage: Local | None = None  # set if the model is a pipeline
        self._inner: Strategy | None = None
        self._server: Exchange | None = None  # of group rank 0
        self._is_averaged = False  # the model's wrapper averages gradients
        self._is_weighed = False  # gradients are weighted in backward
        self._sums = False  # gradients are summed, not averaged
        self._samples: list[float] = []  # samples of each step of the contribution, over all processes
        self._losses: list[float] = []
        self._newest_samples = 0.0
        self._num_shared = 0  # `num_received` of the weights that all processes have; -1: they have others
        self._stop_reason = ""
        if group.rank:
            message = group.receive_message()
            self.settings, self.progress = settings_from(b64decode(message["settings"])), Progress()
            self._link = ProgressLink(self.progress)
            self._link.take(message)  # the rank and the number of workers are known before the first step
        else:
            with self._sharing_errors():
                self._server, self._inner = open_exchange()
            self.settings, self.progress = self._inner.settings, self._inner.progress
            self._link = ProgressLink(self.progress)
            group.watch.expect(self._server.welcome.lease_s)
            settings_bytes = b64encode(self._server.welcome.settings.SerializeToString()).decode()
            group.send_all(self._link.message(self._inner.begun(), settings=settings_bytes))
        self.kind = self.settings.kind

    # ---- together -----------------------------------------------------------------------------

    @contextmanager
    def _sharing_errors(self) -> Iterator[None]:
        """If group rank 0 ends with an error, end the others with it.

        With a sharded model all processes raise it anyway.
        """
        try:
            yield
        except ParamServerError as error:
            if self._sharded is None:
                self._group.send_error(error)
            raise

    def _meet(self, point: int, *numbers: float) -> list[list[float]]:
        """Gather the numbers of each process at a point of the loop.

        Raises UsageError if a process is at another point.
        """
        position = self.progress.position + (self.progress.num_starts << 32)
        found = self._group.gather([point, position, *numbers, *([0.0] * (6 - len(numbers)))])
        for rank, item in enumerate(found):
            if item[:2] != found[0][:2]:
                here, there = (f"{_POINTS[int(at)]}, step {int(step) & _STEP}" for at, step, *_ in (item, found[0]))
                message = f"the processes of a worker have diverged: group rank {rank} is at {here}, group rank 0 at"
                fix = "make all processes take the same steps: end loops and skip steps in all of them alike"
                raise UsageError(f"{message} {there}", fix=fix)
        return [words[2:] for words in found]

    def _together(self, work: Callable[[Strategy], Any], has_weights: bool = True) -> Any:
        """Run `work` on this process's strategy. Then all processes have group rank 0's progress and new weights.

        Returns the result of `work` in group rank 0; with a sharded model, that of this process.
        """
        result = None
        if self._inner is not None:
            with self._sharing_errors():
                result = work(self._inner)
        if self._sharded is not None:
            return result
        if self._inner is None:
            message = self._group.receive_message()
            self._link.take(message)
        else:
            num_received = self.progress.num_received
            is_new = has_weights and (num_received != self._num_shared or self.kind.worker_steps)
            if is_new:
                self._num_shared = num_received
            message = self._link.message(self._inner.begun(), result=result, weights=is_new)
            self._group.send_all(message)
        if message["weights"]:
            self._model.has_moved()
            with torch.no_grad():
                self._group.broadcast_tensors([tensor.data for tensor in self._model.tensors])
        return message["result"]

    # ---- the model ----------------------------------------------------------------------------

    def wraps(self, model: nn.Module) -> None:
        """Check the script's model. Raises UsageError for a model that cannot be averaged."""
        data_parallel = nn.parallel.DistributedDataParallel
        inside = [name for name, item in model.named_modules() if name and isinstance(item, data_parallel)]
        if inside:
            message = f"'{inside[0]}' is wrapped in DistributedDataParallel, but the whole model is not"
            fix = "wrap the whole model or nothing: the worker averages unwrapped models itself"
            raise UsageError(message, fix=fix)
        is_pipeline = isinstance(model, Pipeline)
        is_synchronized = not is_pipeline and synchronize(model, self._group)
        self._is_averaged = isinstance(model, data_parallel)
        divided = divided_tensor(model)
        # The output of a synchronized layer depends on all samples, so gradients need their weights before they reach
        # it.
        if self._is_averaged or (is_synchronized and divided is None):
            self._weigh_outputs(model)
        if self._config.worker.zero == WITHIN_WORKER and divided is None and not is_pipeline:
            message = "worker.zero is 3, but this script's model is whole in each process"
            fix = "call fully_shard(model) before the optimizer is made; or --set worker.zero=0"
            raise UsageError(message, fix=fix)

    def divided(self, model: nn.Module) -> nn.Module:
        if self._config.worker.zero != WITHIN_WORKER:
            return model
        from .member import divide

        return divide(model, self._group)

    def pipeline(
        self, module: nn.Module, layers: Sequence[nn.Module], loss: LossFn, example: Example | None, init: str | None
    ) -> StagedPipeline:
        """The layers of a model as stages, one or two in each process."""
        from .pipeline import StagedPipeline

        return StagedPipeline(module, layers, loss, self._group, self._config.worker, self.kind, example, init)

    def tensors(
        self, model: nn.Module, stepped: Iterable[torch.Tensor], averaged_buffers: Collection[str]
    ) -> ModelTensors:
        is_pipeline = isinstance(model, Pipeline)
        if not is_pipeline and divided_tensor(model) is None:
            return super().tensors(model, stepped, averaged_buffers)
        if not is_pipeline:
            from .member import Sharded
        else:
            from .pipeline import Staged as Sharded
        self._sharded = Sharded(model, self._group, stepped, averaged_buffers)
        self._stage = self._sharded.tensors if is_pipeline else None
        if isinstance(self._inner, AllReduceStrategy):  # group rank 0's, for a whole model
            self._inner.end()
        self._inner = self._sharded.strategy(self._server, self.settings, self._config)
        self._inner.progress.become(self.progress)
        self.progress = self._inner.progress
        self.takes_whole = False
        if not is_pipeline:
            self._weigh_outputs(model)
        return self._sharded.tensors

    def _weigh_outputs(self, model: nn.Module) -> None:
        """Scale gradients by each process's samples, because the processes then take the unweighted mean."""

        def weigh(_module: nn.Module, _args: Any, output: Any) -> None:
            if not torch.is_grad_enabled():
                return
            weights = [item[0] for item in self._group.gather([float(self.num_samples_now())])]
            share = weights[self._group.rank] / sum(weights) * len(weights) if sum(weights) else 1.0
            share = len(weights) if self._sums else share
            for leaf in tree_leaves(output) if share != 1.0 else ():
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda gradient: gradient * share)

        self._is_weighed = True
        model.register_forward_hook(weigh)

    def start(self, model: ModelTensors, optimizer: OptimizerSpec, is_parted: bool = False) -> None:
        self._model, self._sums = model, optimizer.reduction == "sum"
        layout = model.layout if self._sharded is None else self._sharded.whole.layout
        specs = [f"{spec.name} {spec.kind} {spec.dtype} {spec.shape} {spec.averaged}" for spec in layout.specs]
        checksums = self._meet(0, crc32("\n".join(specs).encode()))
        if other := next((rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]), None):
            message = f"the models (tensors, shapes) of group rank 0 and {other} differ"
            raise MismatchError(message, fix="let all run the same script")
        self._together(lambda inner: inner.start(model, optimizer, is_parted))

    def ready(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        if self._sharded is not None and self._stage is None and not is_elementwise(type(optimizer)):  # type: ignore[arg-type]  # mypy takes no class for hashable
            message = "each process of this worker has only a part of each tensor (fully_shard)"
            fix = "use an elementwise optimizer such as AdamW; or DistributedDataParallel or the unwrapped model"
            raise UsageError(f"{type(optimizer).__name__} is not elementwise, but {message}", fix=fix)
        check_takes_dense(optimizer, "the processes of a worker", "or a worker of one process and --mode localsgd")
        self._together(lambda inner: inner.ready(optimizer, step))

    def began(self) -> None:
        if self._inner is not None:
            self._inner.began()

    def begun(self) -> Begun | None:
        return self._inner.begun() if self._inner is not None else self._link.begun

    def optimizer_state(self, parameters: Sequence[torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
        if self._inner is None:
            raise no_optimizer_here(self._group.rank)
        return self._inner.optimizer_state(parameters)

    def _reshard(self) -> None:
        """Called before weights change."""
        if self._sharded is not None:
            self._sharded.reshard()

    # ---- steps --------------------------------------------------------------------------------

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float) -> None:
        if self._stage is None:
            super().clip(parameters, max_norm)
            return
        norm = joint_norm(self._group, [parameter.grad for parameter in parameters])
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

    def agreed(self, is_due: bool) -> bool:
        return is_due if self._sharded is None else bool(self._group.gather([float(is_due)])[0][0])

    def replay(self, position: Position) -> None:
        self._together(lambda inner: inner.replay(position), has_weights=False)

    def pause(self) -> None:
        self._reshard()
        super().pause()

    def restore(self) -> None:
        self._reshard()
        super().restore()

    def replayed(self) -> int:
        self._samples, self._losses = [], []
        self._reshard()
        num_steps: int = self._together(lambda inner: inner.replayed())
        self._num_shared = -1
        return num_steps

    def before_step(self, num_samples: int, losses: Sequence[float], groups: Sequence[dict[str, Any]]) -> None:
        """Average gradients and running statistics over all processes, weighted by samples; or sum the gradients.

        Other buffers are copied from group rank 0.
        """
        parameters = [parameter for group in groups for parameter in group["params"]]
        mask = crc32(bytes(parameter.grad is not None for parameter in parameters))
        loss = sum(losses) / len(losses) if losses else math.nan
        has_loss = not math.isnan(loss)
        found = self._meet(1, num_samples, loss if has_loss else 0.0, has_loss, bool(self._stop_reason), mask)
        if self._stage is not None:  # all processes have the same batch
            found = found[:1] if not any(words[3] for words in found) else [*found[:1], [0.0, 0.0, 0.0, 1.0, 0.0]]
            self._stage.note_gradients(self._group)
        total = sum(words[0] for words in found)
        shares = [words[0] / total if total else 1 / len(found) for words in found]
        self._samples.append(total)
        shown = [(share, words[1]) for share, words in zip(shares, found, strict=True) if words[2]]
        if weight := sum(share for share, _ in shown):
            self._losses.append(sum(share * value for share, value in shown) / weight)
        if any(words[3] for words in found):
            self._share_stop()
        if self._is_averaged or self._stage is not None:
            return
        if any(words[4] != found[0][4] for words in found):
            self._fill(parameters)
        if self._sharded is not None:  # fully_shard averages the other parameters
            parameters = [parameter for parameter in parameters if not is_divided(parameter)]
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        entries = zip(self._model.layout.entries, self._model.tensors, strict=True)
        buffers = [(entry.spec.is_averaged, item.data) for entry, item in entries if entry.spec.kind is Kind.BUFFER]
        statistics = [tensor for is_averaged, tensor in buffers if is_averaged]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        with torch.no_grad():
            if self._is_weighed or self._sums:
                self._group.average(gradients, 1 / self._group.size if self._is_weighed else 1.0)
                gradients = []
            self._group.average([*gradients, *statistics], shares[self._group.rank])
            self._group.broadcast_tensors([item for is_averaged, item in buffers if not is_averaged])

    def _fill(self, parameters: Sequence[torch.Tensor]) -> None:
        """Set missing gradients to zeros if another process has the gradient."""
        have = self._group.gather([float(parameter.grad is not None) for parameter in parameters])
        for item, any_has in zip(parameters, map(any, zip(*have, strict=True)), strict=True):
            if any_has and item.grad is None:
                item.grad = torch.zeros_like(item)

    def _share_stop(self) -> None:
        """Tell all processes that one requests the end of the run. The first reason counts."""
        text = self._stop_reason.encode()[:_REASON_BYTES]
        found = self._group.gather([len(text), *text.ljust(_REASON_BYTES)])
        length, *letters = map(int, next(item for item in found if item[0]))
        if self._inner is not None:
            self._inner.stop(bytes(letters[:length]).decode("utf-8", "replace"))
        self._stop_reason = ""

    def contribute(self, outgoing: Outgoing, parameters: Sequence[torch.Tensor] | None = None) -> None:
        self._newest_samples = sum(self._samples) or self._newest_samples
        contribution = outgoing.contribution
        samples = int(self._newest_samples) or contribution.counts.num_samples
        loss = sum(self._losses) / len(self._losses) if self._losses else float("nan")
        self._samples, self._losses = [], []
        self._reshard()
        counts = replace(contribution.counts, num_samples=samples)
        changed = outgoing.changed(counts=counts, training=replace(contribution.training, loss=loss))

        def contribute(inner: Strategy) -> None:
            inner.check_model()
            inner.contribute(changed, parameters)

        self._together(contribute)

    def cut_short(self) -> bool:
        found = self.progress.cut_short()
        if found:
            self._meet(2)
        return found

    def note(self) -> None:
        if self._inner is not None:
            self._inner.note()

    def changes(self) -> dict[int, torch.Tensor]:
        return self._inner.changes() if self._inner is not None else {}

    def keep(self, changes: dict[int, torch.Tensor]) -> None:
        assert self._inner is not None
        self._inner.keep(changes)

    def went_on(self) -> None:
        if self.settings.overlap_steps > 0:  # a pending reply may have arrived
            self._reshard()
            self._together(lambda inner: inner.went_on())
        elif self._inner is not None:
            self._inner.went_on()

    # ---- evaluations, and the end -------------------------------------------------------------

    def finish(self) -> Final | None:
        self._reshard()
        if any(item[3] for item in self._meet(2, 0, 0, 0, bool(self._stop_reason))):
            self._share_stop()
        final: Final | None = None

        def finish(inner: Strategy) -> bool:
            nonlocal final
            final = inner.finish()
            return final is not None

        if self._together(finish) and final is None:
            final = Final()  # group rank 0 evaluates for this process
        if final is not None and not (final.is_asked and self._sharded is not None):  # otherwise all processes evaluate
            self._group.watch.end()
        return final

    def stop(self, reason: str) -> None:
        self._stop_reason = reason

    def settle(self) -> int:
        self._reshard()
        return self._inner.settle() if self._inner is not None else self.progress.version

    def show_exact(self, version: int) -> int:
        return self._inner.show_exact(version) if self._inner is not None else version

    def measured(self, version: int, metrics: dict[str, float], failure: str = "", exit_code: int = 0) -> None:
        self._reshard()
        if self._inner is not None:
            self._inner.measured(version, metrics, failure, exit_code)

    def leave(self, goodbye: Goodbye, is_interrupted: bool) -> None:
        self._group.watch.end()
        if self._inner is not None:
            if self._stop_reason:
                self._inner.stop(self._stop_reason)
            self._inner.leave(goodbye, is_interrupted)

    def drop(self) -> None:
        if self._sharded is not None:  # if another process ended, the watch should report it first
            time.sleep(WATCH_S)
        if self._inner is not None:
            self._inner.drop()
