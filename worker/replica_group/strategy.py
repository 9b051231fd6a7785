"""A step of a worker that is several processes: what each computed is averaged, group rank 0 exchanges it with the
server as the run's mode has it, and tells the others what came of it.

    backward | mean over the processes | group rank 0: its strategy -> where the run is, weights -> all | next batch

All run the same loop, so each of these methods is called by all, in the same order; `_meet` finds out where they are
not. Where a worker steps itself (localsgd, diloco) each process steps along the mean, and so all stay alike.
"""

from __future__ import annotations

import math
import os
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...common.config.schema import Config
from ...common.errors import MismatchError, ParamServerError, UsageError
from ...common.security import read_token
from ...common.tensors.layout import Kind
from ...common.tensors.optimizers import OptimizerSpec, is_elementwise
from ...common.wire.records import Position
from ..conversation.exchange import Exchange
from ..conversation.messages import Begun, Final, Goodbye, Outgoing, Settings, settings_from
from ..session import Progress
from ..strategies.choice import make_strategy
from ..strategies.direct import Direct, check_takes_dense
from ..tensors.transfer import ModelTensors
from .batch_norm import synchronize
from .group import Group
from .member import begun_of, no_optimizer_here, progress_of, told_begun
from .rendezvous import find_member

if TYPE_CHECKING:
    from .sharded import Sharded

_STEP = 0xFFFFFFFF  # of what is said of a place: the rest is how often the run has said where to start
# What processes of one worker need not have in common.
_OWN = ("worker.local_rank", "worker.device", "worker.threads", "output.", "log.", "slowdown.", "launch.", "server.")
_WATCH_S = 1.0
_MEETINGS = ("session.optimizer()", "step()", "the end of its loop")


def join(config: Config) -> Group:
    """With the other processes of this worker. ParamServerError, which says who is missing or told other things."""
    if config.worker.evaluate:
        raise UsageError(
            "worker.evaluate together with worker.group: who evaluates is one process", fix="leave one out"
        )
    if config.train.precision == "fp16":
        message = "train.precision is fp16 in a worker of several processes: each would leave out other steps"
        raise UsageError(message, fix="bf16, which needs no loss scaler")
    member = find_member(os.environ)
    found = config.worker.device
    if found == "auto":
        found = "cuda" if torch.cuda.is_available() else "cpu"
    if found == "cuda":
        found = f"cuda:{(config.worker.local_rank or 0) % torch.cuda.device_count()}"
    sections = config.model_dump(mode="json")
    settings = {
        f"{section}.{key}": value
        for section, payload in sections.items()
        for key, value in payload.items()
        if not f"{section}.{key}".startswith(_OWN)
    }
    token, trusts_network = read_token(config.security), config.server.insecure
    return Group(member, found, settings, config.worker.give_up_s, token, trusts_network)


def check_sharded(name: str, settings: Settings) -> None:
    """What the run cannot do with a model in parts; UsageError. `name` is of a tensor."""
    message = f"'{name}' is divided among the processes of this worker (fully_shard), and "
    if settings.kind.has_peers:
        fix = "--mode sync, in which the server steps; or DistributedDataParallel or the bare model in the group"
        raise UsageError(f"{message}workers of mode {settings.mode} step whole models themselves", fix=fix)
    if settings.fragments > 1:
        fix = "--fragments 1; or DistributedDataParallel or the bare model in the group"
        raise UsageError(f"{message}policy.fragments is {settings.fragments}", fix=fix)


class Grouped(Direct):
    """`own` is group rank 0's strategy, with the server; the others have none."""

    may_skip = False

    def __init__(self, group: Group, open_own: Callable[[], Direct], divides: bool = False) -> None:
        """Raises in all what `open_own` raises in group rank 0. `divides`: the model is to be in parts."""
        self._group, self._divides = group, divides
        self._sharded: Sharded | None = None  # the model, where it is in parts
        self._own: Direct | None = None
        self._is_averaged = False  # by what the model is wrapped in
        self._is_weighed = False  # what backward begins with, so that gradients already weigh what they should
        self._sums = False  # gradients, where others make a mean of them
        self._samples: list[float] = []  # of each step of the contribution, of all processes,
        self._losses: list[float] = []
        self._newest_samples = 0.0
        self._all_have = (-1, -1)  # version and start of the weights that all have
        self._begun: Begun | None = None
        self._stop_reason = ""
        self.evaluates = not group.rank
        if group.rank:
            self.settings = settings_from(b64decode(group.hear()["settings"]))
            self.progress = Progress()
        else:
            with self._told():
                self._own = open_own()
            self.settings, self.progress = self._own.settings, self._own.progress
            group.expect(self._own._exchange.lease_s)
            group.tell({"settings": b64encode(self._own._exchange.told_settings).decode()})
        self.kind = self.settings.kind

    # ---- together -----------------------------------------------------------------------------

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What ends group rank 0 meanwhile ends the others too, with the same words; where the model is in parts they
        are there themselves."""
        try:
            yield
        except ParamServerError as error:
            if self._sharded is None:
                self._group.tell_error(error)
            raise

    def _meet(self, point: int, *words: float) -> list[list[float]]:
        """What each says, where all come to the same place. UsageError where they do not."""
        position = self.progress.position + (self.progress.num_starts << 32)
        said = self._group.say([point, position, *words, *([0.0] * (6 - len(words)))])
        for rank, item in enumerate(said):
            if item[:2] != said[0][:2]:
                at, first = (_MEETINGS[int(of[0])] for of in (item, said[0]))
                raise UsageError(
                    f"the processes of a worker have parted: group rank {rank} is at {at}, step "
                    f"{int(item[1]) & _STEP}, "
                    f"group rank 0 at {first}, step {int(said[0][1]) & _STEP}",
                    fix="let all take the same steps: what ends a loop or leaves out a step must be the same in all",
                )
        return [text[2:] for text in said]

    def _share(self, result: Any = None, *, has_weights: bool = True) -> Any:
        """Where group rank 0 is in the run, and its weights if there are others; `result` of its. Of a model in parts
        each has its own."""
        if self._sharded is not None:
            return result
        if self._own is None:
            told = self._group.hear()
            self.progress.become(progress_of(told["progress"]))
            if told["begun"] is not False:
                self._begun = begun_of(told["begun"])
        else:
            at = self.progress.version, self.progress.num_starts
            begun: Any = False
            if at[1] != self._all_have[1]:
                begun = told_begun(self._own.begun())
            is_new = has_weights and (at != self._all_have or self.kind.worker_steps)
            told = {"progress": vars(self.progress), "begun": begun, "result": result, "weights": is_new}
            self._all_have = at if is_new else (self._all_have[0], at[1])
            self._group.tell(told)
        if told["weights"]:
            self._model.has_moved()
            with torch.no_grad():
                self._group.give([tensor.data for tensor in self._model.tensors])
        return told["result"]

    # ---- the strategy's -----------------------------------------------------------------------

    def wraps(self, model: nn.Module) -> None:
        """What the script gives to `session.optimizer()`. UsageError for what cannot be averaged."""
        data_parallel = nn.parallel.DistributedDataParallel
        inside = [name for name, item in model.named_modules() if name and isinstance(item, data_parallel)]
        if inside:
            message = f"'{inside[0]}' is wrapped in DistributedDataParallel, and the model is not"
            raise UsageError(message, fix="wrap all of it or nothing: the worker averages what is not wrapped itself")
        is_synchronized = synchronize(model, self._group)
        self._is_averaged = isinstance(model, data_parallel)
        is_parted = any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
        # What a layer gives depends on the samples of all: gradients are weighed before they come to it.
        if self._is_averaged or (is_synchronized and not is_parted):
            self._weigh_what(model)
        parts = (name for name, item in model.named_parameters() if type(item).__name__ == "DTensor")
        if (name := next(parts, None)) is not None:
            check_sharded(name, self.settings)
        elif self._divides:
            raise UsageError(
                "worker.zero is 3, and the model of this script is whole in each process",
                fix="fully_shard(model) before the optimizer is made and session.optimizer(); or --set worker.zero=0",
            )

    def divided(self, model: nn.Module) -> nn.Module:
        if not self._divides:
            return model
        from .sharded import divide

        return divide(model, self._group)

    def tensors(
        self, model: nn.Module, stepped: Iterable[torch.Tensor], averaged_buffers: Collection[str]
    ) -> ModelTensors:
        if not any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
            return super().tensors(model, stepped, averaged_buffers)
        from .sharded import Sharded

        self._sharded = Sharded(model, self._group, stepped, averaged_buffers)
        exchange = self._own._exchange if self._own is not None else None
        member = cast(Exchange, self._sharded.exchange(exchange, self.settings))
        self._own = make_strategy(member, may_send_early=False)
        self.progress = self._own.progress
        self.takes_whole, self.evaluates = False, True
        self._weigh_what(model)
        return self._sharded.tensors

    def _weigh_what(self, model: nn.Module) -> None:
        self._is_weighed = True
        model.register_forward_hook(lambda _module, _args, output: self._weigh(output))

    def _weigh(self, output: Any) -> Any:
        """Of such a model the plain mean over the processes is taken: gradients of what came of more samples count
        more."""
        if not torch.is_grad_enabled():
            return
        said = [item[0] for item in self._group.say([float(self.num_samples_now())])]
        share = said[self._group.rank] / sum(said) * len(said) if sum(said) else 1.0
        share = len(said) if self._sums else share
        if share != 1.0:
            for tree_leaf in tree_leaves(output):
                if isinstance(tree_leaf, torch.Tensor) and tree_leaf.requires_grad:
                    tree_leaf.register_hook(lambda gradient: gradient * share)

    def agreed(self, is_due: bool) -> bool:
        return is_due if self._sharded is None else bool(self._group.say([float(is_due)])[0][0])

    def start(self, model: ModelTensors, optimizer: OptimizerSpec, is_parted: bool = False) -> None:
        self._model, self._sums = model, optimizer.reduction == "sum"
        layout = model.layout if self._sharded is None else self._sharded.whole.layout
        specs = [f"{spec.name} {spec.kind} {spec.dtype} {spec.shape} {spec.averaged}" for spec in layout.specs]
        self._check_alike("models (tensors, shapes)", self._meet(0, crc32("\n".join(specs).encode())))
        if self._sharded is not None and is_parted:
            message = "session.optimizers() of models that are divided among the processes of this worker (fully_shard)"
            raise UsageError(message, fix="one optimizer; or DistributedDataParallel or the bare models in the group")
        if self._own is not None:
            with self._told():
                self._own.start(model, optimizer, is_parted)
        self._share()

    def _check_alike(self, what: str, said: Sequence[Sequence[float]]) -> None:
        if other := next((rank for rank, text in enumerate(said) if text != said[0]), None):
            raise MismatchError(f"the {what} of group rank 0 and {other} differ", fix="let all run the same script")

    def ready(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        if self._sharded is not None and not is_elementwise(type(optimizer)):  # type: ignore[arg-type]  # mypy takes no class for hashable
            raise UsageError(
                f"{type(optimizer).__name__} does not treat each element by itself, and each process of this worker "
                f"has a "
                "part of each tensor (fully_shard)",
                fix="an elementwise optimizer such as AdamW; or DistributedDataParallel or the bare model in the group",
            )
        check_takes_dense(optimizer, "the processes of a worker", "or a worker of one process and --mode localsgd")
        if self._own is not None:
            with self._told():
                self._own.ready(optimizer, step)
        self._share()

    def begun(self) -> Begun | None:
        return self._own.begun() if self._own is not None else self._begun

    def optimizer_state(self, parameters: Sequence[torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
        if self._own is None:
            raise no_optimizer_here(self._group.rank)
        return self._own.optimizer_state(parameters)

    def _reshard(self) -> None:
        """Before weights change."""
        if self._sharded is not None:
            self._sharded.reshard()

    def replay(self, position: Position) -> None:
        if self._own is not None:
            self._own.replay(position)
        self._share(has_weights=False)

    def replayed(self) -> int:
        self._samples, self._losses = [], []
        self._reshard()
        found: int = self._share(self._own.replayed() if self._own is not None else 0)
        self._all_have = (-1, self._all_have[1])
        return found

    def before_step(self, num_samples: int, loss: float, parameters: Sequence[torch.Tensor]) -> None:
        """Gradients of this step (or their sum), and running statistics, become the mean over all processes, weighted
        by the samples of each; other buffers become those of group rank 0."""
        mine = [parameter.grad for parameter in parameters]
        mask = crc32(bytes(item is not None for item in mine))
        words = num_samples, 0.0 if math.isnan(loss) else loss, not math.isnan(loss), bool(self._stop_reason), mask
        said = self._meet(1, *words)
        total = sum(text[0] for text in said)
        shares = [text[0] / total if total else 1 / len(said) for text in said]
        self._samples.append(total)
        has_loss = sum(share for share, text in zip(shares, said, strict=True) if text[2])
        if has_loss:
            self._losses.append(sum(share * text[1] for share, text in zip(shares, said, strict=True)) / has_loss)
        if any(text[3] for text in said):
            self._hear_stop()
        if self._is_averaged:
            return
        if any(text[4] != said[0][4] for text in said):
            self._fill(parameters)
        if self._sharded is not None:  # fully_shard has the mean of the rest
            parameters = self._sharded.plain_of(parameters)
        for element in parameters:
            if element.grad is not None and element.grad.is_sparse:
                element.grad = element.grad.to_dense()
        entries = zip(self._model.layout.entries, self._model.tensors, strict=True)
        buffers = [(entry.spec.averaged, item.data) for entry, item in entries if entry.spec.kind is Kind.BUFFER]
        statistics = [tensor for is_averaged, tensor in buffers if is_averaged and tensor.dtype.is_floating_point]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        with torch.no_grad():
            if self._is_weighed or self._sums:
                self._group.average(gradients, 1 / self._group.size if self._is_weighed else 1.0)
                gradients = []
            self._group.average([*gradients, *statistics], shares[self._group.rank])
            self._group.give([item for is_averaged, item in buffers if not is_averaged])

    def _fill(self, parameters: Sequence[torch.Tensor]) -> None:
        """With zeros, where another process has a gradient."""
        here = [float(parameter.grad is not None) for parameter in parameters]
        for item, there in zip(parameters, map(any, zip(*self._group.say(here), strict=True)), strict=True):
            if there and item.grad is None:
                item.grad = torch.zeros_like(item)

    def _hear_stop(self) -> None:
        """Any process may ask for the end of the run; the first that did is heard."""
        said = self._stop_reason.encode()[:500]
        found = self._group.say([len(said), *said, *([0] * (500 - len(said)))])
        first = next(item for item in found if item[0])
        if self._own is not None:
            self._own.stop(bytes(map(int, first[1 : 1 + int(first[0])])).decode("utf-8", "replace"))
        self._stop_reason = ""

    def contribute(self, outgoing: Outgoing, parameters: Sequence[torch.Tensor] | None = None) -> None:
        self._newest_samples = sum(self._samples) or self._newest_samples
        contribution = outgoing.contribution
        samples = int(self._newest_samples) or contribution.counts.num_samples
        loss = sum(self._losses) / len(self._losses) if self._losses else float("nan")
        self._samples, self._losses = [], []
        if self.progress.is_cut_short:
            self._meet(2)
        self._reshard()
        if self._own is not None:
            with self._told():
                counts = replace(contribution.counts, num_samples=samples)
                training = replace(contribution.training, loss=loss)
                self._own.contribute(outgoing.changed(counts=counts, training=training), parameters)
        self._share()

    def went_on(self) -> None:
        is_merging = self.settings.merge.after_steps > 0  # what was under way may have come
        if is_merging:
            self._reshard()
        if self._own is not None:
            self._own.went_on()
        if is_merging:
            self._share()

    def finish(self, can_evaluate: bool) -> Final | None:
        self._reshard()
        if any(item[3] for item in self._meet(2, 0, 0, 0, bool(self._stop_reason))):
            self._hear_stop()
        if self._own is not None:
            with self._told():
                final = self._own.finish(can_evaluate)
            self._share([final.evaluate] if final is not None else [])
        else:
            found = self._share()
            final = Final(evaluate=found[0] and self._sharded is not None) if found else None
        if final is not None and not (final.evaluate and self._sharded is not None):  # then all evaluate
            self._group.end()
        return final

    def stop(self, reason: str) -> None:
        self._stop_reason = reason

    def settle(self) -> int:
        self._reshard()
        return self._own.settle() if self._own is not None else self.progress.version

    def measured(self, version: int, metrics: dict[str, float], failure: str = "", exit_code: int = 0) -> None:
        self._reshard()
        if self._own is not None:
            self._own.measured(version, metrics, failure, exit_code)

    def leave(self, goodbye: Goodbye, is_interrupted: bool) -> None:
        self._group.end()
        if self._own is not None:
            if self._stop_reason:
                self._own.stop(self._stop_reason)
            self._own.leave(goodbye, is_interrupted)

    def drop(self) -> None:
        if self._sharded is not None:  # this process may have lost another within the model: the watch says whom
            time.sleep(_WATCH_S)
        if self._own is not None:
            self._own.drop()
