"""Computes a model, a list of layers, in microbatches in one process.

`worker/replica_group/pipeline.py` computes the same model with stages in several processes. Both draw the same random
numbers and add the same gradients in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...common.errors import UsageError
from ...common.reporting.log import get_logger
from ...common.tensors.statistics import batch_norms
from .data import seed_everything

log = get_logger()

# Returns the mean loss of a microbatch. The function calls its model argument once, with one tensor.
LossFn = Callable[[Any, Any], torch.Tensor]

Example = Callable[[int], Any]  # returns one microbatch; the argument is the number of microbatches in a batch

_TUPLE_FIX = "take one tensor and return one tensor: pack several tensors into one, or join the layers between them"


class Pipeline(nn.Module):
    """Computes a list of layers in microbatches.

    `loss = pipeline(inputs, target)` computes the loss and adds the gradients. `pipeline(inputs)` returns the outputs
    without gradients. `module` is the model. Its tensors keep the names that they have in it.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module], loss: LossFn, microbatches: int) -> None:
        super().__init__()
        self.module = module
        self.layers = tuple(layers)  # not registered as submodules: `module` has their tensors
        self._loss, self._microbatches = loss, microbatches
        self._warned: set[tuple[int, int]] = set()  # pairs of batch size and number of microbatches
        self._autocast: tuple[str, torch.dtype | None] = ("cpu", None)
        if names := batch_norms(module, with_synchronized=True):
            meaning = "BatchNorm normalises with the statistics of each microbatch; GroupNorm and LayerNorm do not"
            log.warning("batch_norm", layers=", ".join(names[:4]), meaning=meaning)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Returns the state_dict of the model."""
        return self.module.state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.load_state_dict(*args, **options)

    def forward(self, inputs: torch.Tensor, *target: Any) -> torch.Tensor:
        if target:
            return self.step((inputs, *target))
        with torch.no_grad():
            return self._outputs(inputs)

    def step(self, batch: Any, share: float = 1.0) -> torch.Tensor:
        """Add the gradient of `share` times the mean loss of a batch. Returns the loss in every process.

        Under no_grad it only computes the loss.
        """
        if not torch.is_grad_enabled():
            return self._loss(self._outputs, batch)
        parts = self._split(batch)
        device = next(self.parameters()).device
        is_on = torch.is_autocast_enabled(device.type)
        self._autocast = device.type, torch.get_autocast_dtype(device.type) if is_on else None
        seed = int(torch.randint(2**62, (), device="cpu"))
        drawn = torch.get_rng_state()
        with torch.autocast(device.type, enabled=False):  # backward runs without autocast
            loss = self._accumulate(batch, parts, share / len(parts), seed)
        torch.set_rng_state(drawn)
        return torch.tensor(loss, device=device)

    def _accumulate(self, batch: Any, parts: list[Any], scale: float, seed: int) -> float:
        """Add the gradients of the microbatches, each multiplied by `scale`. Returns their mean loss."""
        losses = []
        for number, part in enumerate(parts):
            through = Once(partial(self._through, number, seed))
            with self._casting():
                loss = self._loss(through, part)
            losses.append(float(loss.detach()))
            (loss * scale).backward()
        return sum(losses) / len(losses)

    def _through(self, number: int, seed: int, inputs: torch.Tensor) -> torch.Tensor:
        output = compute(self.layers, 0, inputs, number, seed)
        reseed(seed, number, len(self.layers))
        return output

    def _outputs(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs

    @contextmanager
    def _casting(self) -> Iterator[None]:
        device, dtype = self._autocast
        with torch.autocast(device, dtype, enabled=dtype is not None):
            yield

    # ---- microbatches -------------------------------------------------------------------------

    def _split(self, batch: Any) -> list[Any]:
        """Returns the batch as equal microbatches, at most worker.microbatches of them."""
        leaves, form = tree_flatten(batch)
        sizes = {len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
        if len(sizes) != 1:
            message = f"the tensors of a batch must have one number of samples in a pipeline, but have {sorted(sizes)}"
            raise UsageError(message, fix="make the samples of the batch the first axis of each tensor")
        size = sizes.pop()
        most = min(size, self._microbatches)
        num = max((num for num in range(1, most + 1) if size % num == 0), default=1)
        if num < most and (size, num) not in self._warned:
            self._warned.add((size, num))
            log.warning(
                "microbatches",
                reason=f"{self._microbatches} microbatches (worker.microbatches) do not divide a batch of {size} "
                f"samples: the batch is computed in {num} microbatches of {size // num}",
                fix="use a batch size that is a multiple of worker.microbatches, and shard(..., drop_last=True)",
            )
        cut = [
            leaf.split(size // num) if isinstance(leaf, torch.Tensor) and leaf.dim() else [leaf] * num
            for leaf in leaves
        ]
        return [tree_unflatten(list(part), form) for part in zip(*cut, strict=True)]


class Once:
    """Replaces the model in a call of the loss function, and checks that it is called once with one tensor."""

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._run, self._is_called = run, False

    def __call__(self, *inputs: Any, **named: Any) -> torch.Tensor:
        if self._is_called or named or len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor):
            message = "the loss function of a pipeline calls its model twice, or with other arguments than one tensor"
            raise UsageError(message, fix="call the model once with one tensor: loss_fn(model(inputs), target)")
        self._is_called = True
        return self._run(inputs[0])


class _Captured(Exception):
    """Carries the inputs out of a loss function."""


def loss_of(loss_fn: Callable[..., torch.Tensor]) -> LossFn:
    """Returns the LossFn of a function of outputs and targets. A batch is (inputs, target, ...)."""
    return lambda model, batch: loss_fn(model(batch[0]), *batch[1:])


def inputs_of(loss_fn: LossFn, batch: Any) -> torch.Tensor:
    """Returns the tensor with which a loss function calls its model. Raises UsageError if it makes no call."""

    def capture(inputs: torch.Tensor) -> NoReturn:
        raise _Captured(inputs)

    try:
        loss_fn(Once(capture), batch)
    except _Captured as captured:
        (inputs,) = captured.args
        return inputs
    raise UsageError("the loss of a pipeline does not call its model", fix="call it: loss_fn(model(inputs), ...)")


def compute(layers: Sequence[nn.Module], first: int, inputs: torch.Tensor, number: int, seed: int) -> torch.Tensor:
    """Returns the output of these layers for microbatch `number`; `first` is the index of the first layer.

    Random numbers of a layer, e.g. for dropout, depend on its index, on `number` and on `seed`. They do not depend on
    the process that computes the layer.
    """
    for index, layer in enumerate(layers, first):
        reseed(seed, number, index)
        inputs = output_of(layer, inputs, index)
    return inputs


def reseed(seed: int, number: int, index: int) -> None:
    """Seed torch for layer `index` and microbatch `number`."""
    seed_everything((seed + 1_000_003 * number + 7_919 * index) % 2**62)


def output_of(layer: nn.Module, inputs: torch.Tensor, index: int, tensors: Any = None) -> torch.Tensor:
    """Returns what a layer computes, with these tensors if given. Raises UsageError if that is not a tensor, or if
    BatchNorm gets a single value."""
    try:
        output = layer(inputs) if tensors is None else functional_call(layer, tensors, (inputs,))
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        message = f"layer {index} of the pipeline has BatchNorm, and a microbatch has {len(inputs)} sample"
        fix = "fewer microbatches (--set worker.microbatches=N), a larger batch, or GroupNorm or LayerNorm"
        raise UsageError(message, fix=fix) from None
    return check_tensor(output, layer, index)


def check_tensor(output: Any, layer: nn.Module, index: int) -> torch.Tensor:
    """Returns the output of a layer. Raises UsageError if it is not a tensor."""
    if not isinstance(output, torch.Tensor):
        message = f"layer {index} of the pipeline ({type(layer).__name__}) returns a {type(output).__name__}"
        raise UsageError(f"{message}, but a stage sends one tensor to the next stage", fix=_TUPLE_FIX)
    return output


def on_meta(module: nn.Module) -> bool:
    return any(item.is_meta for item in (*module.parameters(), *module.buffers()))


def check_weights(module: nn.Module, init: str | None) -> None:
    """Raises UsageError for a model on the meta device if no file has its initial weights or its buffers."""
    if not on_meta(module):
        return
    if init is None:
        message = "the layers of the pipeline are on the meta device, and no initial weights are given"
        raise UsageError(message, fix="give a file: session.pipeline(..., init='FILE.safetensors'), or --init FILE")
    saved = {id(item) for item in module.state_dict(keep_vars=True).values()}
    if name := next((name for name, item in module.named_buffers() if id(item) not in saved), None):
        message = f"buffer '{name}' is on the meta device and is not saved (persistent=False)"
        raise UsageError(message, fix="compute it in forward(), or register it with persistent=True")


def layers_of(model: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, list[nn.Module]]:
    """Returns the model and its layers in the order of their calls. Raises UsageError if the layers are unknown."""
    if not isinstance(model, nn.Module):
        module = nn.Sequential(*model)
        return module, list(module)
    if callable(make := getattr(model, "pipeline", None)):
        layers = list(make())
    elif isinstance(model, nn.Sequential):
        layers = list(model)
    else:
        message = f"the layers of {type(model).__name__} for a pipeline are unknown"
        raise UsageError(message, fix="give a list of layers, an nn.Sequential, or a model with a method pipeline()")
    known = {id(item) for item in (*model.parameters(), *model.buffers())}
    for index, layer in enumerate(layers):
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if id(tensor) not in known:
                message = f"'{name}' of layer {index} of {type(model).__name__}.pipeline() is not a tensor of the model"
                raise UsageError(message, fix="return the modules of the model, not copies of them")
    return model, layers
