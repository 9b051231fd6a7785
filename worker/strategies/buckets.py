"""Buckets of tensors that a group averages, in memory of their own and in one order for all members.

Members must start the same sums in the same order. So a bucket starts when it is full and all earlier buckets have
started, as in DDP (Li et al. 2020). The order is the reverse of the model's, because backward ends with the first
layer.

A member's weight is known when all members have announced their samples, at `step()`. Buckets that start earlier use
the announcement of the previous step. If that is wrong, all members average again (`group.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import chain

import torch

_BUCKET_BYTES = 25 << 20  # reduced at once, as in DDP
_FIRST_BYTES = 1 << 20  # the first bucket starts early
_WHOLE_BYTES = 256 << 10  # smaller tensors are broadcast together

Packs = list[tuple[torch.Tensor, list[torch.Tensor]]]


class Plan:
    """The place and the bucket of each tensor that any member has. `share` scales this member's tensors."""

    def __init__(
        self, like: dict[int, torch.Tensor], share: float, is_lowest: bool, memory: dict[torch.dtype, torch.Tensor],
        device: torch.device, of_lowest: Container[int] = (), of_sum: Container[int] = (), checks: bool = True,
    ) -> None:  # fmt: skip
        """`like`: a tensor of the shape and dtype of each, in the order in which they are sent.

        `memory`: flat tensors on `device` by dtype; a tensor of another size is replaced. `of_lowest`: floats that come
        from the lowest member, as integers do. `of_sum`: tensors that are not scaled. `checks`: `unsound` may be
        called.
        """
        self.share, self._is_lowest, self._of_lowest, self._of_sum = share, is_lowest, of_lowest, of_sum
        self._checks = checks
        self.places: dict[int, torch.Tensor] = {}
        self.buckets: list[tuple[list[int], torch.Tensor]] = []
        # The tensors that this member has put into each bucket of floats, and the sum of the bucket.
        self._sums: list[tuple[list[int], torch.Tensor]] = []
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in like.items():
            by_dtype.setdefault(tensor.dtype, []).append(index)
        for dtype, indices in by_dtype.items():
            size = sum(like[index].numel() for index in indices)
            if dtype not in memory or len(memory[dtype]) != size:
                memory[dtype] = torch.empty(size, dtype=dtype, device=device)
            flat, begun, end, bucket = memory[dtype], 0, 0, list[int]()
            for index in indices:
                start, end = end, end + like[index].numel()
                self.places[index] = flat[start:end].view(like[index].shape)
                bucket.append(index)
                full = _BUCKET_BYTES if self.buckets else _FIRST_BYTES
                if (end - begun) * flat.itemsize >= full:
                    self.buckets.append((bucket, flat[begun:end]))
                    bucket, begun = [], end
            if begun < end:
                self.buckets.append((bucket, flat[begun:end]))

    def gather(self, number: int, tensors: Mapping[int, torch.Tensor | None]) -> torch.Tensor:
        """Fill a bucket with this member's tensors.

        Zeros stand for tensors that it lacks, and for tensors of the lowest member on other members.
        """
        indices, bucket = self.buckets[number]
        filled: list[int] = []
        for index in indices:
            target, tensor = self.places[index], tensors.get(index)
            is_float = target.dtype.is_floating_point
            is_summed = is_float and index not in self._of_lowest
            if tensor is None or not (is_summed or self._is_lowest):
                target.zero_()
                continue
            filled.append(index)
            tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
            share = 1.0 if index in self._of_sum else self.share
            if is_summed and share != 1.0 and tensor.device == target.device:
                torch.mul(tensor, share, out=target)
            else:
                target.copy_(tensor)
                if is_summed and share != 1.0:
                    target.mul_(share)
        if self._checks and bucket.dtype.is_floating_point:
            self._sums.append((filled, bucket.sum()))
        return bucket

    def unsound(self, tensors: Mapping[int, torch.Tensor | None]) -> int | None:
        """Index of the first tensor with NaN or Inf since the last call; None: all gathered tensors are finite."""
        sums, self._sums = self._sums, []
        if not sums:
            return None
        # One sum per bucket is cheap to read from a GPU. A sum may overflow, so the tensors of a suspect bucket are
        # checked element by element.
        found = torch.stack([item.to(torch.float32) for _, item in sums]).isfinite().tolist()
        looked_at = [filled for (filled, _), is_sound in zip(sums, found, strict=True) if not is_sound]
        candidates = ((index, tensors.get(index)) for index in sorted(chain.from_iterable(looked_at)))
        return next((index for index, item in candidates if item is not None and not is_finite(item)), None)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor has neither NaN nor Inf."""
    return bool(torch.isfinite(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()).all())


def packed(
    tensors: Sequence[torch.Tensor], may_go_alone: Callable[[torch.Tensor], bool], device: torch.device
) -> Packs:
    """Group tensors into buffers to broadcast: large tensors by themselves, others of one dtype in a copy on `device`.

    Each buffer comes with the tensors that it is a copy of; the list is empty if the buffer is the tensor.
    """
    packs: Packs = []
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= _WHOLE_BYTES and tensor.is_contiguous() and may_go_alone(tensor):
            packs.append((tensor, []))
        else:
            small.setdefault(tensor.dtype, []).append(tensor)
    for several in small.values():
        packs.append((torch.cat([item.reshape(-1).to(device) for item in several]), several))
    return packs


def unpack(packs: Packs) -> None:
    """Copy each buffer to the tensors that it is a copy of."""
    for flat, several in packs:
        pieces = flat.split([item.numel() for item in several]) if several else ()
        for tensor, piece in zip(several, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))
