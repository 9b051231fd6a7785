"""Runs 1F1B and GPipe over Gloo, for stages on CPUs: messages travel while a process computes.

    group rank 0   F0 F1 F2 .. B0 F3 B1 F4 B2 ..
    group rank 1      F0 B0 F1 B1 F2 B2 F3 B3 ..

Torch's own schedules (`torch.distributed.pipelining`) begin a receive when its tensor is needed, so that both ends wait
for each message. Here each receive begins one microbatch earlier. Without a memory limit, 1F1B also runs ahead by one
microbatch per boundary (eager 1F1B, Zhuang et al., MLSys 2023). Torch's schedules also take 1.5 s to import, in each
stage that starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ...common.errors import UsageError
from .group import Channel

NAMES = ("1f1b", "gpipe")
_WINDOW = 4  # messages of a stage on their way; each keeps its tensor
_MAX_AXES = 12
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
           torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128)  # fmt: skip
_SHAPE_TAG = 1 << 20  # of messages with a Border; others have the number of their microbatch


def num_ahead(schedule: str, size: int, index: int, num: int, is_eager: bool) -> int:
    """Returns the number of microbatches whose activations stage `index` of `size` keeps at once."""
    if schedule.lower() == "gpipe":
        return num
    return min(num, size - index + is_eager * (size - index - 1))


def actions(ahead: int, num: int) -> Iterator[tuple[bool, int]]:
    """Yield (whether it is a forward pass, its microbatch): `ahead` forward passes, then one backward for each."""
    yield from ((True, number) for number in range(ahead))
    for number in range(num):
        yield False, number
        if ahead + number < num:
            yield True, ahead + number


class Border(NamedTuple):
    """The tensors that pass from one stage to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Border:
        return Border(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def numbers(self) -> list[int]:
        """Returns the border as equally many numbers, whatever the shape. Raises UsageError if that is impossible."""
        if self.dtype not in _DTYPES or len(self.shape) > _MAX_AXES:
            message = f"a stage returns a tensor of {len(self.shape)} axes and {self.dtype}, which cannot be sent"
            raise UsageError(message, fix=f"at most {_MAX_AXES} axes, and a dtype of torch's usual ones")
        padding = [0] * (_MAX_AXES - len(self.shape))
        return [_DTYPES.index(self.dtype), int(self.requires_grad), len(self.shape), *self.shape, *padding]

    @staticmethod
    def from_numbers(numbers: list[int]) -> Border:
        dtype, requires_grad, num_axes, *shape = numbers
        return Border(tuple(shape[:num_axes]), _DTYPES[dtype], bool(requires_grad))

    def send(self, channel: Channel, rank: int) -> None:
        channel.wait([channel.send(torch.tensor(self.numbers(), device="cpu"), rank, _SHAPE_TAG)])

    @staticmethod
    def receive(channel: Channel, rank: int) -> Border:
        numbers = torch.empty(3 + _MAX_AXES, dtype=torch.int64, device="cpu")
        channel.wait([channel.receive(numbers, rank, _SHAPE_TAG)])
        return Border.from_numbers(numbers.tolist())

    def empty(self, device: torch.device | None = None) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def with_gradient(output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Returns a scalar. Its backward pass equals that of `output` with this gradient.

    `torch.autograd.backward(output, gradient)` would import sympy, which takes 0.5 s in each stage that starts.
    """
    return (output * gradient.conj()).real.sum()


class _Inbox:
    """Receives the tensors of `num` microbatches from another stage. Each receive begins one microbatch early."""

    def __init__(self, channel: Channel, source: int, border: Border, num: int) -> None:
        self._channel, self._source, self._border, self._numbers = channel, source, border, iter(range(num))
        self._pending: deque[tuple[torch.Tensor, Any]] = deque()  # with the works of torch
        self._begin()

    def take(self) -> torch.Tensor:
        """Returns the tensor of the next microbatch. Blocks until it has arrived."""
        self._begin()
        tensor, work = self._pending.popleft()
        self._channel.wait([work])
        return tensor

    def _begin(self) -> None:
        if (number := next(self._numbers, None)) is not None:
            tensor = self._border.empty()
            self._pending.append((tensor, self._channel.receive(tensor, self._source, number)))


Loss = Callable[[torch.Tensor, int], torch.Tensor]  # of an output and the number of its microbatch


class Chain:
    """The stage of this process in a chain with one stage in each process, for batches of one shape.

    `loss(output, number)` returns the loss of a microbatch; only the last stage calls it.
    """

    def __init__(self, piece: nn.Module, channel: Channel, num: int, ahead: int, loss: Loss) -> None:
        """`num` microbatches, of which this stage keeps `ahead` at once."""
        self._piece, self._channel, self._num, self._ahead, self._loss = piece, channel, num, ahead, loss
        self._rank, self._is_last = channel.rank, channel.rank == channel.size - 1
        self._incoming: Border | None = None  # known once the first microbatch has passed
        self._outgoing: Border | None = None
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def step(self, inputs: torch.Tensor) -> None:
        """Add the gradients of a batch. `inputs` counts in the first stage only. Blocks until all stages are done."""
        parts = inputs.split(len(inputs) // self._num)
        if self._rank and self._incoming is None:
            self._incoming = Border.receive(self._channel, self._rank - 1)
        channel, num, gradients = self._channel, self._num, None
        activations = _Inbox(channel, self._rank - 1, self._incoming, num) if self._incoming is not None else None
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # inputs and outputs
        for is_forward, number in actions(self._ahead, self._num):
            if is_forward:
                taken = parts[number]
                if activations is not None and self._incoming is not None:
                    taken = activations.take().requires_grad_(self._incoming.requires_grad)
                kept[number] = taken, self._forward(taken, number)
                if gradients is None and self._outgoing is not None and self._outgoing.requires_grad:
                    gradients = _Inbox(channel, self._rank + 1, self._outgoing, num)
                continue
            taken, output = kept.pop(number)
            if self._is_last:
                output.backward()
            elif gradients is not None:
                with_gradient(output, gradients.take()).backward()
            if self._incoming is not None and self._incoming.requires_grad:
                gradient = taken.grad if taken.grad is not None else torch.zeros_like(taken)
                self._send(gradient, self._rank - 1, number)
        self._await_sent(num_left=0)

    def _forward(self, inputs: torch.Tensor, number: int) -> torch.Tensor:
        output: torch.Tensor = self._piece(inputs)
        if self._is_last:
            return self._loss(output, number)
        border = Border.of(output)
        if self._outgoing is None:
            border.send(self._channel, self._rank + 1)
            self._outgoing = border
        elif border != self._outgoing:
            message = f"the output of stage {self._rank} is {border} for microbatch {number}, and was {self._outgoing}"
            raise UsageError(message, fix="equal microbatches need equal outputs: pad them to one shape")
        self._send(output.detach(), self._rank + 1, number)
        return output

    def _send(self, tensor: torch.Tensor, rank: int, number: int) -> None:
        tensor = tensor.contiguous()
        self._sent.append((self._channel.send(tensor, rank, number), tensor))
        self._await_sent(num_left=_WINDOW)

    def _await_sent(self, num_left: int) -> None:
        while len(self._sent) > num_left:
            self._channel.wait([self._sent.popleft()[0]])
